"""The treemla command from end to end: what people type, and what they get.

    TREEMLA=build/treemla TREEMLA_CASES=cases python3 tests/cli/cli_test.py [TestClass[.test_name]]
"""
import csv
import json
import math
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import tempfile
import unittest
import xml.dom.minidom

TREEMLA = os.path.abspath(os.environ.get("TREEMLA", "build/treemla"))
CASES = os.path.abspath(os.environ.get("TREEMLA_CASES", "cases"))
SMALL_CASE = os.path.join(CASES, "h8_p0_b8.kdtr")
COMMANDS = ("verify", "gen", "tree", "step", "bench", "plan", "info")
TIMEOUT = 300  # a hang fails instead of blocking the whole test run


def treemla(*args, **kwargs):
    """Runs the command with string arguments; a single string is split like a shell would."""
    if len(args) == 1 and isinstance(args[0], str):
        args = shlex.split(args[0])
    return subprocess.run([TREEMLA, *args], capture_output=True, text=True, timeout=TIMEOUT, **kwargs)


def read_safetensors(path):
    """(header, buffer): the header with its tensors' offsets into the buffer."""
    with open(path, "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + size]), bytearray(data[8 + size:])


def write_safetensors(path, header, buffer):
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + buffer)


def poke(buffer, header, tensor, index, fmt, value):
    """Overwrites one element of a tensor."""
    struct.pack_into("<" + fmt, buffer, header[tensor]["data_offsets"][0] + index * struct.calcsize(fmt), value)


class CliTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_ok(self, *args, **kwargs):
        result = treemla(*args, **kwargs)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stderr, "")
        return result.stdout

    def assert_refused(self, result, *words, stdout=""):
        """Exit code 2 and one line on standard error that holds all the words."""
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stderr, r"\Atreemla: [^\n]+\n\Z")
        for word in words:
            self.assertIn(word, result.stderr)
        if stdout is not None:
            self.assertEqual(result.stdout, stdout)

    def gen(self, options, name="case.kdtr"):
        path = self.path(name)
        self.run_ok(*shlex.split("gen " + options), "--out", path)
        return path


class Trees(CliTest):
    def scores(self, name, tensor, dtype, shape, values):
        """A safetensors file with one tensor."""
        fmt = {"F32": "f", "BF16": "H", "F16": "H"}[dtype]
        data = struct.pack(f"<{len(values)}{fmt}", *values)
        path = self.path(name)
        write_safetensors(path, {tensor: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}, data)
        return path

    def test_a_tree_in_every_format(self):
        tree = "tree --parents -1,0,1,0,1 --path 0,1,4"
        text = self.run_ok(tree)
        self.assertEqual(text.splitlines()[1:], ["0  *", "|- 1  *", "|  |- 2", "|  `- 4  *", "`- 3"])
        mask = self.run_ok(tree + " --format mask")
        self.assertEqual([line.split()[1] for line in mask.splitlines()[1:]], ["#....", "##...", "###..", "#..#.", "##..#"])
        dot = self.run_ok(tree + " --format dot")
        self.assertIn("n1 -> n4 [penwidth=3];", dot)
        svg = xml.dom.minidom.parseString(self.run_ok(tree + " --format svg"))
        self.assertEqual(len(svg.getElementsByTagName("line")), 4)

    def test_trees_of_cases_and_generated_ones(self):
        self.assertIn("9 nodes", self.run_ok("tree", SMALL_CASE))
        self.assertIn("12 nodes, 4 deep, at positions 300 to 304",
                      self.run_ok("tree", os.path.join(CASES, "h20_ragged_b3.kdtr"), "--request", "1"))
        self.assertIn("6 nodes, 5 deep", self.run_ok("tree --tree chain --budget 5"))

    def test_a_tree_from_scores(self):
        logits = [0, 1, 3, 0, 0, 3, 0, 2]
        path = self.scores("logits.safetensors", "logits", "F32", [2, 4], logits)
        lines = self.run_ok("tree", "--scores", path, "--budget", "3").splitlines()
        self.assertEqual([re.sub(r",.*", "", line) for line in lines[1:]],
                         ["0", "`- 1: token 2", "   |- 2: token 1", "   `- 3: token 3"])
        eagle = self.run_ok("tree", "--scores", path, "--budget", "3", "--method", "eagle", "--top_k", "2")
        self.assertEqual(sorted(re.findall(r"token \d", eagle)), ["token 1", "token 2", "token 3"])
        batch = self.scores("batch.safetensors", "log_probs", "BF16", [2, 1, 2], [0x0000, 0xBF80, 0xBF80, 0x0000])
        self.assertIn("1: token 1", self.run_ok("tree", "--scores", batch, "--request", "1", "--budget", "1"))

    def test_bad_trees_and_scores(self):
        self.assert_refused(treemla("tree --parents -1,0,5"), "parent of node 2")
        self.assert_refused(treemla("tree --parents 0"), "node 0 is the root")
        self.assert_refused(treemla("tree --parents -1,0 --path 2"), "--path 2: must be below 2")
        self.assert_refused(treemla("tree", SMALL_CASE, "--request", "5"), "--request 5: must be below 1")
        self.assert_refused(treemla("tree", SMALL_CASE, "--parents", "-1"), "--parents", "together")
        nan = self.scores("nan.safetensors", "logits", "F32", [1, 2], [float("nan"), 1])
        self.assert_refused(treemla("tree", "--scores", nan), "hold NaN")
        for name, tensor, dtype, shape, count, words in [
                ("name", "scores", "F32", [1, 2], 2, ("logits", "log_probs")),
                ("dtype", "logits", "F16", [1, 2], 2, ("must be F32 or BF16",)),
                ("rank", "logits", "F32", [4], 4, ("[L, V] or [b, L, V]",)),
                ("deep", "logits", "F32", [65, 1], 65, ("L to 64",))]:
            path = self.scores(name, tensor, dtype, shape, [0] * count)
            self.assert_refused(treemla("tree", "--scores", path), *words)
        self.assert_refused(treemla("tree", "--scores", self.path("missing")), "missing")

    def test_a_step_on_every_recorded_case(self):
        for name in sorted(os.listdir(CASES)):
            for method in ("greedy", "sample"):
                out = self.run_ok("step", os.path.join(CASES, name), "--method", method)
                for stage in ("build", "verify", "accept", "compact", "checked"):
                    self.assertRegex(out, rf"(?m)^{stage} ")
                self.assertIn(" 0 are not where the next step looks for them", out)
                self.assertEqual(out.split("verify", 1)[1].split("accept", 1)[1],
                                 self.run_ok("step", os.path.join(CASES, name), "--method", method)
                                 .split("verify", 1)[1].split("accept", 1)[1])
        none = self.gen("--h_q 2 --prefix 20 --budget 3 --mask none")
        self.assert_refused(treemla("step", none), "mask is none")


class Usage(CliTest):
    def test_help_of_every_command(self):
        top = self.run_ok("--help")
        self.assertEqual(top, self.run_ok("-h"))
        for command in COMMANDS:
            self.assertIn(command, top)
            text = self.run_ok(command, "--help")
            self.assertIn(f"treemla {command}", text)
            self.assertRegex(text, r"Examples?:\n  treemla " + command)
            self.assertIn("Exit codes: 0 success", text)
            self.assertEqual([line for line in text.splitlines() if len(line) > 120], [])

    def test_examples_of_the_help_texts_parse(self):
        for command in COMMANDS:
            examples = re.findall(r"^  treemla (.*)$", treemla(command, "--help").stdout, re.MULTILINE)
            self.assertTrue(examples)
            for example in examples:
                result = treemla(*shlex.split(example), "--help")
                self.assertEqual(result.returncode, 0, example)

    def test_version(self):
        self.assertRegex(self.run_ok("--version"), r"\Atreemla \d+\.\d+\.\d+\n\Z")

    def test_wrong_commands(self):
        self.assert_refused(treemla(), "command is missing", "verify, gen, tree, step, bench, plan, info")
        self.assert_refused(treemla("frobnicate"), "frobnicate: there is no such command", "verify, gen")
        self.assert_refused(treemla("--frobnicate"), "--frobnicate")
        self.assert_refused(treemla("verify"), "files", "treemla verify --help")
        self.assert_refused(treemla("verify", SMALL_CASE, "--frobnicate"), "--frobnicate")
        self.assert_refused(treemla("info", "extra"), "extra")
        self.assert_refused(treemla("gen"), "--out")
        self.assert_refused(treemla("plan"), "--arch")

    def test_threads_of_the_environment(self):
        for value in ("abc", "0", "-1", "4097", "1x"):
            run = treemla("verify", SMALL_CASE, env={**os.environ, "TREEMLA_NUM_THREADS": value})
            self.assertEqual(run.returncode, 2, value)
            self.assertEqual(run.stdout, "")
            self.assertIn(f"TREEMLA_NUM_THREADS = {value} in the environment must be 1 to 4096", run.stderr)
        run = treemla("verify", SMALL_CASE, env={**os.environ, "TREEMLA_NUM_THREADS": "1"})
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_wrong_values_name_option_value_and_what_is_allowed(self):
        out = self.path("x.kdtr")
        for command, option, value, allowed in [
            ("gen", "--prefix", "-5", "an integer from 0 to"),
            ("gen", "--prefix", "1e99", "an integer from 0 to"),
            ("gen", "--prefix", "99999999999", "an integer from 0 to"),
            ("gen", "--prefix", "99999999999999999999999", "an integer from 0 to"),
            ("gen", "--prefix", "12x", "an integer from 0 to"),
            ("gen", "--prefix", "", "an integer from 0 to"),
            ("gen", "--budget", "-1", "an integer from 0 to"),
            ("gen", "--h_q", "0", "an integer from 1 to 1024"),
            ("gen", "--page_size", "0", "an integer from 1 to"),
            ("gen", "--seed", "-1", "an integer from 0 to"),
            ("gen", "--gain", "nan", "a number from 0 to"),
            ("gen", "--gain", "-1", "a number from 0 to"),
            ("gen", "--sm_scale", "inf", "a number from"),
            ("gen", "--sm_scale", "0", "a number from"),
            ("gen", "--tree", "oak", "one of chain, star, binary, random, ddtree"),
            ("gen", "--mask", "Tree", "one of tree, causal, none"),
            ("gen", "--dtype", "e4m3", "one of fp32, fp16, bf16"),
            ("gen", "--kv_dtype", "int8", "one of fp32, fp16, bf16, e4m3"),
            ("gen", "--requests", "abc", "PREFIX:NODES pairs, e.g. 300:9,63:1"),
            ("gen", "--requests", "300:9,,63:1", "PREFIX:NODES pairs"),
            ("gen", "--requests", "300:9:1", "PREFIX:NODES pairs"),
            ("gen", "--requests", "-3:9", "PREFIX from 0"),
            ("gen", "--requests", "", "PREFIX:NODES pairs"),
            ("bench", "--b", "0", "a comma list of integers from 1 to"),
            ("bench", "--s_q", "1,,2", "a comma list of integers from 1 to"),
            ("bench", "--s_q", "1,2,", "a comma list of integers from 1 to"),
            ("bench", "--h_q", "8;16", "a comma list of integers from 1 to"),
            ("bench", "--prefix", "", "a comma list of integers from 0 to"),
            ("bench", "--threads", "-1", "an integer from 0 to"),
            ("bench", "--threads", "99999999999", "an integer from 0 to"),
            ("bench", "--seconds", "0", "a number from 0.001 to 3600"),
            ("bench", "--dtype", "bf16,int4", "a comma list of fp32, fp16, bf16, e4m3"),
            ("bench", "--backend", "cpu_simd,", "a comma list of best, all,"),
            ("bench", "--grid", "huge", "one of default, peers"),
            ("verify", "--backend", "tpu", "one of all,"),
            ("verify", "--precision", "fp8", "one of auto, fp32, bf16, fp16"),
            ("verify", "--threads", "1.5", "an integer from 0 to"),
            ("plan", "--arch", "sm_7", "allowed are cpu, h200"),
            ("plan", "--workers", "-2", "an integer from 0 to"),
        ]:
            with self.subTest(command=command, option=option, value=value):
                required = {"gen": ["--out", out], "verify": [SMALL_CASE], "plan": ["--arch", "h200"]}
                others = [] if option == "--arch" else required.get(command, [])
                result = treemla(command, *others, option, value)
                self.assert_refused(result, value or '""', allowed, option.lstrip("-"))
        self.assertFalse(os.path.exists(out))

    def test_values_with_control_characters_stay_on_one_line(self):
        result = treemla("gen", "--out", self.path("x.kdtr"), "--tree", "a\nb\x1b[31m")
        self.assert_refused(result, "--tree")
        self.assertNotIn("\x1b", result.stderr)

    def test_options_that_exclude_each_other(self):
        result = treemla("gen", "--requests", "3:9", "--prefix", "4", "--out", self.path("x.kdtr"))
        self.assert_refused(result, "--requests 3:9", "together with --prefix")
        self.assert_refused(treemla("plan --arch h200 --requests 3:9 --b 2"), "--requests 3:9", "together with --b")

    def test_an_option_given_twice(self):
        self.assert_refused(treemla("gen", "--h_q", "4", "--h_q", "8", "--out", self.path("x.kdtr")), "--h_q")


class Verify(CliTest):
    def test_recorded_cases(self):
        text = self.run_ok("verify", CASES, "--backend", "cpu_simd")
        rows = [line.split() for line in text.splitlines() if "PASS" in line]
        self.assertEqual(len(rows), 12)  # six cases in fp32 and in bf16
        self.assertEqual({row[0] for row in rows}, {name[:-5] for name in os.listdir(CASES)})
        self.assertEqual([row[0] for row in rows], sorted(row[0] for row in rows))
        self.assertIn("12 checks passed, 0 failed", text)
        self.assertNotIn("skipped", text)

    def test_every_available_backend_by_default(self):
        text = self.run_ok("verify", SMALL_CASE)
        for backend in ("cpu_simd", "cpu_oracle"):
            self.assertIn(backend, text)
        # An oracle is judged once, in float32.
        self.assertEqual(len(re.findall("cpu_oracle +fp32", text)), 1)
        self.assertEqual(len(re.findall("cpu_oracle +bf16", text)), 0)

    def test_precisions(self):
        for precision in ("fp32", "bf16", "fp16"):
            text = self.run_ok("verify", SMALL_CASE, "--precision", precision, "--backend", "cpu_simd")
            self.assertRegex(text, f"cpu_simd +{precision} ")
            self.assertIn("1 checks passed", text)

    def test_several_arguments_and_folders(self):
        folder = self.path("folder")
        os.mkdir(folder)
        self.gen("--h_q 2 --prefix 5 --budget 2", "folder/b.kdtr")
        self.gen("--h_q 2 --prefix 5 --budget 2", "folder/a.kdtr")
        with open(os.path.join(folder, "notes.txt"), "w") as f:
            f.write("not a case")
        os.mkdir(os.path.join(folder, "folder.kdtr"))
        text = self.run_ok("verify", SMALL_CASE, folder, "--backend", "cpu_simd", "--precision", "fp32")
        self.assertEqual([line.split()[0] for line in text.splitlines() if "PASS" in line], ["h8_p0_b8", "a", "b"])

    def test_json(self):
        report = json.loads(self.run_ok("verify", SMALL_CASE, "--json"))
        self.assertEqual(report["exit_code"], 0)
        self.assertEqual(report["errors"], [])
        (case,) = report["cases"]
        self.assertEqual((case["b"], case["total_q"], case["h_q"], case["keys"]), (1, 9, 8, 9))
        self.assertEqual((case["mask"], case["q_dtype"], case["kv_dtype"], case["expected"]),
                         ("tree", "bf16", "bf16", "file"))
        checks = {(check["backend"], check["precision"]): check for check in case["checks"]}
        self.assertLessEqual({("cpu_simd", "fp32"), ("cpu_simd", "bf16"), ("cpu_oracle", "fp32")}, set(checks))
        for check in checks.values():
            self.assertTrue(check["ok"])
            self.assertLess(check["max_out_of_bound"], 1)
            self.assertGreater(check["seconds"], 0)
        self.assertLess(checks["cpu_simd", "fp32"]["rel_fro"], 5e-6)

    def test_a_wrong_value_fails_and_is_named(self):
        header, buffer = read_safetensors(SMALL_CASE)
        d_v, h_q = 512, 8
        poke(buffer, header, "expected_out", (3 * h_q + 2) * d_v + 17, "f", 1000.0)
        path = self.path("wrong.kdtr")
        write_safetensors(path, header, buffer)
        result = treemla("verify", path, "--backend", "cpu_simd", "--precision", "fp32")
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        self.assertRegex(result.stdout,
                         r"FAIL wrong, cpu_simd, fp32: out of node 3, head 2, column 17: \S+ where 1000")
        self.assertRegex(result.stdout, r"error \S+ > bound")
        self.assertIn("0 checks passed, 1 failed", result.stdout)
        report = json.loads(treemla("verify", path, "--json", "--backend", "cpu_simd").stdout)
        self.assertEqual(report["exit_code"], 1)
        self.assertIn("column 17", report["cases"][0]["checks"][0]["failure"])

        poke(buffer, header, "expected_out", (3 * h_q + 2) * d_v + 17, "f", math.nan)
        write_safetensors(path, header, buffer)
        self.assertEqual(treemla("verify", path, "--backend", "cpu_simd", "--json").returncode, 1)

    def test_a_wrong_lse_fails(self):
        header, buffer = read_safetensors(SMALL_CASE)
        poke(buffer, header, "expected_lse", 5, "f", -77.0)
        path = self.path("wrong.kdtr")
        write_safetensors(path, header, buffer)
        result = treemla("verify", path, "--backend", "cpu_simd", "--precision", "fp32")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stdout, r"lse of node 0, head 5: \S+ where -77 is expected")

    def test_a_case_without_expected_values(self):
        path = self.gen("--h_q 2 --prefix 40 --budget 3 --no-expected")
        text = self.run_ok("verify", path)
        self.assertIn("no expected values in the file; cpu_oracle computed them", text)
        report = json.loads(self.run_ok("verify", path, "--json"))
        self.assertEqual(report["cases"][0]["expected"], "cpu_oracle")

    def test_unusable_paths(self):
        self.assert_refused(treemla("verify", self.path("absent.kdtr")), "absent.kdtr", "No such file")
        empty = self.path("empty")
        os.mkdir(empty)
        self.assert_refused(treemla("verify", empty), "empty", "no .kdtr file")
        os.mkfifo(self.path("fifo"))
        self.assert_refused(treemla("verify", self.path("fifo")), "fifo", "regular file")
        self.assert_refused(treemla("verify", "/dev/zero"), "/dev/zero", "regular file")

    def test_goes_on_after_a_bad_file_and_the_worst_code_wins(self):
        bad = self.path("bad.kdtr")
        with open(bad, "wb") as f:
            f.write(b"nonsense")
        result = treemla("verify", bad, SMALL_CASE, "--backend", "cpu_simd")
        self.assert_refused(result, "bad.kdtr", stdout=None)
        self.assertIn("2 checks passed", result.stdout)

        header, buffer = read_safetensors(SMALL_CASE)
        poke(buffer, header, "expected_out", 0, "f", 1000.0)
        wrong = self.path("wrong.kdtr")
        write_safetensors(wrong, header, buffer)
        for order in ((wrong, bad), (bad, wrong)):
            self.assertEqual(treemla("verify", *order, "--backend", "cpu_simd").returncode, 2)
        report = json.loads(treemla("verify", wrong, bad, "--json", "--backend", "cpu_simd").stdout)
        self.assertEqual(report["exit_code"], 2)
        self.assertEqual([error["file"] for error in report["errors"]], [bad])


class HostileFiles(CliTest):
    """Each gives one line that names the field and the value, and exit code 2."""

    def check(self, header, buffer, *words):
        path = self.path("hostile.kdtr")
        write_safetensors(path, header, buffer)
        self.assert_refused(treemla("verify", path), "hostile.kdtr", *words)

    def test_truncated_anywhere(self):
        with open(SMALL_CASE, "rb") as f:
            data = f.read()
        (size,) = struct.unpack("<Q", data[:8])
        path = self.path("truncated.kdtr")
        for length in (0, 1, 7, 8, 9, 8 + size // 2, 8 + size - 1, 8 + size, 9 + size, len(data) - 1):
            with self.subTest(length=length):
                with open(path, "wb") as f:
                    f.write(data[:length])
                self.assert_refused(treemla("verify", path), "truncated.kdtr")
        with open(path, "wb") as f:
            f.write(data + b"x")
        self.assert_refused(treemla("verify", path), "truncated.kdtr")

    def test_header_length_that_lies(self):
        with open(SMALL_CASE, "rb") as f:
            data = f.read()
        path = self.path("lying.kdtr")
        for size in (0, 1, 2**31, 2**63, 2**64 - 1, 2**64 - 8):
            with self.subTest(size=size):
                with open(path, "wb") as f:
                    f.write(struct.pack("<Q", size) + data[8:])
                self.assert_refused(treemla("verify", path), "lying.kdtr")

    def test_bit_flips_never_crash(self):
        with open(SMALL_CASE, "rb") as f:
            data = f.read()
        (size,) = struct.unpack("<Q", data[:8])
        path = self.path("flipped.kdtr")
        header_bits = range(0, 8 * (8 + size), 97)  # every header byte region, a different bit each time
        for bit in header_bits:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << (bit % 8)
            with open(path, "wb") as f:
                f.write(flipped)
            result = treemla("verify", path, "--backend", "cpu_simd", "--precision", "fp32")
            self.assertIn(result.returncode, (0, 1, 2), f"bit {bit}: {result.stderr}")
            if result.returncode == 2:
                self.assert_refused(result, "flipped.kdtr")

    def test_cyclic_tree(self):
        header, buffer = read_safetensors(SMALL_CASE)
        poke(buffer, header, "parents", 4, "i", 6)
        self.check(header, buffer, "parents[4]", "6", "node 4 of request 0")

    def test_trees_that_are_none(self):
        header, original = read_safetensors(SMALL_CASE)
        for node, parent in ((0, 0), (0, -2), (2, 2), (3, -1), (3, 1000), (8, -2147483648), (8, 2147483647)):
            with self.subTest(node=node, parent=parent):
                buffer = bytearray(original)
                poke(buffer, header, "parents", node, "i", parent)
                self.check(header, buffer, f"parents[{node}]", str(parent))

    def test_page_index_out_of_range(self):
        header, original = read_safetensors(SMALL_CASE)
        for page in (-1, 100000, 2147480000, 2147483647, -2147483648):
            with self.subTest(page=page):
                buffer = bytearray(original)
                poke(buffer, header, "page_indices", 0, "i", page)
                self.check(header, buffer, "page", str(page), "request 0")

    def test_lengths_that_lie(self):
        header, original = read_safetensors(SMALL_CASE)
        for tensor, index, value in (("kv_len", 0, 3), ("kv_len", 0, -9), ("kv_len", 0, 2147483647),
                                     ("q_indptr", 0, 1), ("q_indptr", 1, 4), ("q_indptr", 1, -1),
                                     ("page_indptr", 1, 2147483647), ("page_indptr", 0, -1)):
            with self.subTest(tensor=tensor, index=index, value=value):
                buffer = bytearray(original)
                poke(buffer, header, tensor, index, "i", value)
                self.check(header, buffer, f"{tensor.replace('page_', '')}", str(value))

    def test_metadata_that_is_wrong(self):
        original, buffer = read_safetensors(SMALL_CASE)
        for key, value in (("version", "2"), ("format", "kdtx"), ("d_v", "-512"), ("d_v", "1e3"), ("d_rope", "63"),
                           ("page_size", "0"), ("page_size", "99999999999"), ("sm_scale", "nan"), ("sm_scale", "x"),
                           ("mask", "forest"), ("lse_base", "2")):
            with self.subTest(key=key, value=value):
                header = json.loads(json.dumps(original))
                header["__metadata__"][key] = value
                self.check(header, buffer, "q" if key == "d_rope" else key)
        for key in ("version", "format", "d_v", "sm_scale", "mask", "page_size"):
            with self.subTest(missing=key):
                header = json.loads(json.dumps(original))
                del header["__metadata__"][key]
                self.check(header, buffer, key)

    def test_tensors_that_are_wrong(self):
        original, buffer = read_safetensors(SMALL_CASE)

        def change(**changes):
            header = json.loads(json.dumps(original))
            for name, fields in changes.items():
                if fields is None:
                    del header[name]
                else:
                    header[name].update(fields)
            return header

        begin, end = original["q"]["data_offsets"]
        self.check(change(q={"data_offsets": [begin, end + 2]}), buffer, "q")
        self.check(change(q={"data_offsets": [end, begin]}), buffer, "q")
        self.check(change(q={"data_offsets": [0, 2**63]}), buffer, "q")
        self.check(change(q={"shape": [9, 8, -576]}), buffer, "q")
        self.check(change(q={"shape": [2**40, 2**40, 576]}), buffer, "q")
        self.check(change(q={"dtype": "F64"}), buffer, "q")
        self.check(change(kv={"dtype": "I32"}), buffer, "kv")
        for name in ("q", "kv", "q_indptr", "kv_len", "page_indptr", "page_indices", "parents", "expected_lse"):
            self.check(change(**{name: None}), buffer)

    def test_names_with_escape_codes_are_not_printed_raw(self):
        header, buffer = read_safetensors(SMALL_CASE)
        header["evil\x1b[2Jname\n"] = header.pop("q")
        path = self.path("hostile\x1b[31m.kdtr")
        write_safetensors(path, header, buffer)
        result = treemla("verify", path)
        self.assert_refused(result)
        self.assertNotIn("\x1b", result.stderr)

    def test_deeply_nested_header(self):
        path = self.path("deep.kdtr")
        text = b"{\"a\":" + b"[" * 200000
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
        self.assert_refused(treemla("verify", path), "deep.kdtr")


class Gen(CliTest):
    def verify(self, path):
        return self.run_ok("verify", path, "--backend", "cpu_simd")

    def test_round_trip_of_every_tree(self):
        for tree in ("chain", "star", "binary", "random", "ddtree"):
            with self.subTest(tree=tree):
                self.verify(self.gen(f"--h_q 3 --prefix 70 --budget 40 --tree {tree}", f"{tree}.kdtr"))
                header, buffer = read_safetensors(self.path(f"{tree}.kdtr"))
                begin, end = header["parents"]["data_offsets"]
                parents = struct.unpack("<41i", buffer[begin:end])
                if tree == "chain":
                    self.assertEqual(parents, tuple(range(-1, 40)))
                if tree == "star":
                    self.assertEqual(parents, (-1,) + (0,) * 40)

    def test_round_trip_of_every_mask_and_dtype(self):
        for mask in ("tree", "causal", "none"):
            for dtype, kv_dtype in (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "e4m3"),
                                    ("bf16", "e4m3_packed"), ("bf16", "q8_0"), ("fp32", "q8_0"), ("fp32", "bf16"),
                                    ("bf16", "fp32")):
                with self.subTest(mask=mask, dtype=dtype, kv_dtype=kv_dtype):
                    name = f"{mask}-{dtype}-{kv_dtype}.kdtr"
                    path = self.gen(f"--h_q 2 --prefix 50 --budget 8 --mask {mask} --dtype {dtype} "
                                    f"--kv_dtype {kv_dtype} --page_size 4", name)
                    text = self.verify(path)
                    self.assertRegex(text, f" {dtype} ")  # judged in the case's own precision
                    header, _ = read_safetensors(path)
                    self.assertEqual(header["__metadata__"]["mask"], mask)
                    self.assertEqual(header["kv"]["dtype"],
                                     {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "e4m3": "F8_E4M3", "e4m3_packed": "U8",
                                      "q8_0": "U8"}[kv_dtype])

    def test_shapes(self):
        for i, options in enumerate((
            "--h_q 1 --prefix 0 --budget 0",
            "--h_q 5 --prefix 33 --budget 6 --d_v 256 --d_rope 32",
            "--h_q 2 --prefix 33 --budget 6 --d_rope 0",
            "--h_q 2 --prefix 100 --budget 3 --page_size 64 --kv_dtype e4m3 --kv_scale 0.25",
            "--h_q 2 --prefix 100 --budget 3 --page_size 64 --kv_dtype e4m3_packed --d_v 256 --kv_scale 0.37",
            "--h_q 2 --prefix 100 --budget 3 --page_size 64 --kv_dtype q8_0 --d_v 256 --d_rope 32 --kv_scale 0.37",
            "--h_q 2 --prefix 100 --budget 3 --gain 0.01",
            "--h_q 2 --prefix 100 --budget 3 --gain 100",
            "--h_q 2 --requests 300:9,63:1,0:5,7:0 --page_size 16",
        )):
            with self.subTest(options=options):
                self.verify(self.gen(options, f"{i}.kdtr"))

    def test_packed_rows(self):
        header, _ = read_safetensors(self.gen("--h_q 2 --prefix 9 --budget 1 --kv_dtype e4m3_packed"))
        self.assertEqual(header["__metadata__"]["kv_layout"], "e4m3_packed")
        self.assertEqual((header["kv"]["dtype"], header["kv"]["shape"][1]), ("U8", 656))
        for options, says in (("--d_v 192", "d_v = 192 must be a multiple of 128"), ("--d_rope 31", "d_rope = 31 must be even")):
            with self.subTest(options=options):
                result = treemla("gen", "--prefix", "9", "--kv_dtype", "e4m3_packed", *options.split(), "--out", self.path("y.kdtr"))
                self.assert_refused(result, says)

    def test_q8_rows(self):
        header, _ = read_safetensors(self.gen("--h_q 2 --prefix 9 --budget 1 --kv_dtype q8_0"))
        self.assertEqual(header["__metadata__"]["kv_layout"], "q8_0")
        self.assertEqual((header["kv"]["dtype"], header["kv"]["shape"][1]), ("U8", 612))
        for options, says in (("--d_v 500", "d_v = 500 must be a multiple of 32"), ("--d_rope 16", "d_rope = 16 must be a multiple of 32")):
            with self.subTest(options=options):
                result = treemla("gen", "--prefix", "9", "--kv_dtype", "q8_0", *options.split(), "--out", self.path("y.kdtr"))
                self.assert_refused(result, says)

    def test_ragged_requests(self):
        header, buffer = read_safetensors(self.gen("--h_q 2 --requests 300:9,63:1 --page_size 16"))
        ints = lambda name: struct.unpack(
            f"<{header[name]['shape'][0]}i", buffer[header[name]["data_offsets"][0]:header[name]["data_offsets"][1]])
        self.assertEqual(ints("q_indptr"), (0, 9, 10))
        self.assertEqual(ints("kv_len"), (309, 64))

    def test_the_seed_decides(self):
        options = "--h_q 2 --prefix 30 --budget 5"
        contents = []
        for name, seed in (("a", 7), ("b", 7), ("c", 8)):
            with open(self.gen(f"{options} --seed {seed}", name), "rb") as f:
                contents.append(f.read())
        self.assertEqual(contents[0], contents[1])
        self.assertNotEqual(contents[0], contents[2])

    def test_overwrites_only_when_forced(self):
        path = self.gen("--h_q 2 --prefix 3 --budget 1")
        with open(path, "rb") as f:
            before = f.read()
        options = ("gen", "--h_q", "4", "--prefix", "3", "--budget", "1", "--out", path)
        self.assert_refused(treemla(*options), path, "exists already", "--force")
        with open(path, "rb") as f:
            self.assertEqual(f.read(), before)
        self.run_ok(*options, "--force")
        with open(path, "rb") as f:
            self.assertNotEqual(f.read(), before)

    def test_prints_one_line_of_what_was_written(self):
        path = self.path("x.kdtr")
        text = self.run_ok("gen", "--h_q", "2", "--prefix", "3", "--budget", "1", "--out", path)
        self.assertRegex(text, r"\Awrote .*x\.kdtr, [\d.]+ KiB: [^\n]*h_q=2[^\n]*\n\Z")

    def test_unwritable_output(self):
        tiny = ("gen", "--h_q", "1", "--prefix", "1", "--force", "--out")
        self.assert_refused(treemla(*tiny, self.path("no/such/x.kdtr")), "x.kdtr")
        self.assert_refused(treemla(*tiny, self.folder), self.folder)
        self.assertEqual(os.listdir(self.folder), [])

    def test_too_large_for_memory_is_refused_not_tried(self):
        result = treemla("gen", "--prefix", "1000000000", "--budget", "1", "--out", self.path("x.kdtr"))
        self.assert_refused(result, "memory", "TiB")

    def test_gain_that_overflows_the_dtype(self):
        result = treemla("gen", "--prefix", "9", "--dtype", "fp16", "--gain", "1000000", "--out", self.path("x.kdtr"))
        self.assert_refused(result, "gain", "fp16")


class Bench(CliTest):
    TINY = "bench --seconds 0.01 --threads 1 "
    TINY_SIMD = TINY + "--backend cpu_simd "

    @classmethod
    def setUpClass(cls):
        """One run that several tests look at: every run measures the ceilings first, which takes a second or two."""
        with tempfile.TemporaryDirectory() as folder:
            csv_path, json_path = os.path.join(folder, "rows.csv"), os.path.join(folder, "rows.json")
            cls.result = treemla(
                *shlex.split(cls.TINY + "--s_q 3 --h_q 2 --prefix 16,64 --page_size 1,8 --dtype bf16,e4m3"),
                "--backend", "cpu_simd,cpu_oracle", "--csv", csv_path, "--json", json_path)
            with open(csv_path, newline="") as f:
                cls.csv_text = f.read()
            with open(json_path) as f:
                cls.json_text = f.read()

    def test_table(self):
        self.assertEqual((self.result.returncode, self.result.stderr), (0, ""))
        rows = [line.split() for line in self.result.stdout.splitlines() if line.startswith("cpu_")]
        self.assertEqual(len(rows), 16)
        self.assertEqual({row[-1] for row in rows}, {"yes"})
        self.assertEqual({row[0] for row in rows}, {"cpu_simd", "cpu_oracle"})
        self.assertRegex(self.result.stdout, r"ceilings +float32 FMA [\d.]+ GFLOP/s, (bf16 dot [\d.]+ GFLOP/s, )?(AMX [\d.]+ GFLOP/s, )?read [\d.]+ GB/s")
        self.assertRegex(self.result.stdout, r"\n16 rows in ")

    def test_csv(self):
        self.assertTrue(self.csv_text.startswith("device,"))  # the header line comes first
        rows = list(csv.DictReader(self.csv_text.splitlines()))
        self.assertEqual(len(rows), 16)
        for row in rows:
            self.assertNotIn(None, row)
            self.assertNotIn(None, row.values())
            self.assertEqual((row["b"], row["s_q"], row["h_q"], row["mask"], row["tree"], row["threads"]),
                             ("1", "3", "2", "tree", "random", "1"))
            self.assertGreater(float(row["warm_us"]), 0)
            self.assertGreater(float(row["cold_us"]), 0)
            self.assertGreaterEqual(float(row["noise"]), 0)
            self.assertGreater(float(row["gb_per_s"]), 0)
            self.assertGreater(float(row["of_read"]), 0)
            self.assertGreater(float(row["of_fma"]), 0)
            if row["of_dot"]:  # a CPU with bf16 dot products, a bf16 cache
                self.assertGreater(float(row["of_dot"]), 0)
            self.assertEqual(row["checked"], "yes")
            self.assertRegex(row["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
            self.assertTrue(row["device"] and row["revision"])
        self.assertEqual({(row["backend"], row["prefix"], row["page_size"], row["dtype"]) for row in rows},
                         {(b, p, s, d) for b in ("cpu_simd", "cpu_oracle") for p in ("16", "64") for s in ("1", "8")
                          for d in ("bf16", "e4m3")})

    def test_json(self):
        report = json.loads(self.json_text)
        self.assertGreater(report["ceilings"]["fma_flops_per_s"], 1e8)
        self.assertIn("dot_flops_per_s", report["ceilings"])
        self.assertGreater(report["ceilings"]["read_bytes_per_s"], 1e7)
        self.assertIn("--s_q 3", report["command"])
        for key in ("treemla", "revision", "date", "devices", "system", "compiler", "memory_bytes", "threads"):
            self.assertIn(key, report)
        self.assertEqual(len(report["rows"]), 16)
        for row in report["rows"]:
            # 2 * nodes * heads * keys * (d_qk + d_v), keys = prefix + nodes
            self.assertEqual(row["flops"], 2 * 3 * 2 * (row["prefix"] + 3) * 1088)
            self.assertAlmostEqual(row["tflop_per_s"], row["flops"] / row["warm_us"] * 1e-6, delta=1e-9)
            self.assertAlmostEqual(row["gb_per_s"], row["bytes"] / row["cold_us"] * 1e-3, delta=1e-9)

    def test_masks_trees_and_batches(self):
        for options in ("--mask none --b 1,3", "--mask causal --tree chain", "--tree ddtree --s_q 33 --prefix 0",
                        "--dtype fp32,fp16", "--dtype e4m3_packed", "--dtype q8_0"):
            with self.subTest(options=options):
                prefix = "" if "--prefix" in options else "--prefix 40 "
                s_q = "" if "--s_q" in options else "--s_q 9 "
                text = self.run_ok(self.TINY_SIMD + "--h_q 2 " + prefix + s_q + options)
                rows = [line.split() for line in text.splitlines() if line.startswith("cpu_")]
                self.assertTrue(rows)
                self.assertEqual({row[-1] for row in rows}, {"yes"})

    def test_rows_beyond_memory_are_not_available_and_say_why(self):
        path = self.path("rows.csv")
        options = self.TINY_SIMD + "--s_q 1 --h_q 2 --prefix 16,1000000000 --b 64"
        text = self.run_ok(*shlex.split(options), "--csv", path)
        self.assertRegex(text, r"1000000000 +n/a +n/a\n")
        self.assertRegex(text, r"n/a: .* prefix 1000000000 .*: needs")
        with open(path, newline="") as f:
            rows = {row["prefix"]: row for row in csv.DictReader(f)}
        self.assertTrue(rows["16"]["cold_us"])
        self.assertEqual(rows["1000000000"]["cold_us"], "")
        self.assertIn("needs", rows["1000000000"]["not_run"])

    def test_no_row_that_fits_is_an_error(self):
        self.assertEqual(treemla(self.TINY_SIMD + "--s_q 1 --h_q 2 --prefix 1000000000 --b 64").returncode, 2)

    def test_peers_grid(self):
        path = self.path("rows.csv")
        self.run_ok(*shlex.split(self.TINY_SIMD + "--grid peers --prefix 16 --b 1 --s_q 1"), "--csv", path)
        with open(path, newline="") as f:
            self.assertEqual([row["h_q"] for row in csv.DictReader(f)], ["8", "16", "64", "128"])

    def test_bad_files_are_refused_before_measuring(self):
        for option in ("--csv", "--json"):
            self.assert_refused(treemla("bench", option, self.path("no/such/file")), option, "file", "No such file")


class PlanAndInfo(CliTest):
    def test_every_arch(self):
        for arch in ("h200", "h100", "rtx_pro_6000", "rtx_5090", "a100", "l40s", "sm_90", "sm_120", "cpu"):
            with self.subTest(arch=arch):
                text = self.run_ok("plan", "--arch", arch)
                for word in ("device", "provenance", "work", "tile", "splits", "balanced", "predicted"):
                    self.assertIn(word, text)

    def test_floor_of_a_known_shape(self):
        text = self.run_ok("plan --arch h200 --b 8 --s_q 33 --h_q 8 --prefix 65536")
        self.assertRegex(text, r"floor +memory 134 us, bf16 matrix 430 us: compute-bound")
        self.assertRegex(text, r"predicted +4\d\d us = floor / balance \+ launch")
        self.assertRegex(self.run_ok("plan --arch h200 --s_q 9 --h_q 8 --prefix 16384"), "memory-bound")

    def test_plan_of_the_whole_grid(self):
        lines = self.run_ok("plan --arch sm_120 --grid").splitlines()
        rows = [line.split() for line in lines if line.split()[:1] in (["1"], ["8"])]
        self.assertEqual(len(rows), 120)
        self.assertEqual(rows[0][:4], ["1", "1", "8", "256"])
        self.assertEqual(rows[-1][:4], ["8", "33", "128", "65536"])
        if "cuda_mma" in self.run_ok("plan --arch sm_120"):  # built with nvcc
            self.assertEqual({row[4] for row in rows}, {"cuda_mma"})
            lines = self.run_ok("plan --arch h200 --grid").splitlines()
            rows = [line.split() for line in lines if line.split()[:1] in (["1"], ["8"])]
            self.assertEqual({row[4] for row in rows}, {"cuda_wgmma"})
        self.assert_refused(treemla("plan --arch sm_120 --grid --b 2"), "--grid", "together with --b")

    def test_packed_cache(self):
        plan = "plan --arch h200 --s_q 9 --prefix 991 --kv_dtype e4m3_packed"
        self.assertIn(" 656 kB of cache once", self.run_ok(plan))
        self.assert_refused(treemla(*plan.split(), "--d_v", "500"), "d_v = 500 must be a multiple of 128")

    def test_q8_cache(self):
        plan = "plan --s_q 9 --prefix 991 --kv_dtype q8_0 --arch"
        self.assertRegex(self.run_ok(plan + " cpu"), r"612 kB of cache once(.|\n)*kernel +cpu_simd")
        self.assertRegex(self.run_ok(plan + " h200"), "kernel +none")

    def test_ragged_and_listed(self):
        text = self.run_ok("plan --arch cpu --requests 300:9,63:1 --items 100 --workers 3")
        self.assertIn("2 requests", text)
        self.assertRegex(text, r"worker +request +rows +keys +partial")
        self.assertRegex(text, r"of 3 workers")

    def test_batch_invariant(self):
        text = self.run_ok("plan --arch cpu --prefix 4096 --batch_invariant --split_keys 512")
        self.assertIn("every 512 keys (batch-invariant)", text)

    def test_unknown_rates_make_no_prediction(self):
        self.assertRegex(self.run_ok("plan --arch cpu"), "predicted +unknown")
        measured = self.run_ok("plan --arch cpu --measure --workers 1")
        self.assertRegex(measured, r"predicted +\S+ \S+ = floor / balance\n")
        self.assert_refused(treemla("plan --arch h200 --measure"), "--measure", "cpu only")

    def test_inert_batches(self):
        self.run_ok("plan --arch h200 --requests 0:0,5:0")

    def test_info(self):
        text = self.run_ok("info")
        for word in ("treemla", "build", "cpu", "simd", "memory", "cpu_simd", "cpu_oracle"):
            self.assertRegex(text, rf"(?m)^{word} ")


class UnusableBackends(CliTest):
    """Backends of this build that this machine can't run, if there are any."""

    def setUp(self):
        super().setUp()
        rows = [line.split(maxsplit=3) for line in treemla("info").stdout.splitlines()]
        self.unusable = {row[0]: row[3] for row in rows
                         if len(row) == 4 and row[1] in ("host", "device") and row[2] == "no"}
        if not self.unusable:
            self.skipTest("every backend of this build is usable here")

    def test_verify_says_why(self):
        for name, reason in self.unusable.items():
            result = treemla("verify", SMALL_CASE, "--backend", name)
            self.assert_refused(result, "no backend asked for takes this case", stdout=None)
            self.assertEqual(result.stdout.count(f"skipped: {reason}"), 1)
        text = self.run_ok("verify", SMALL_CASE, "--backend", "all")
        self.assertEqual(text.count("skipped: "), len(self.unusable))
        self.assertNotIn("skipped", self.run_ok("verify", SMALL_CASE))

    def test_bench_says_why_and_goes_on(self):
        name, reason = next(iter(self.unusable.items()))
        text = self.run_ok("bench", "--seconds", "0.01", "--s_q", "1", "--h_q", "1", "--prefix", "8",
                           "--backend", f"{name},cpu_simd")
        self.assertRegex(text, f"n/a: {name} .*: {re.escape(reason)}")
        self.assertRegex(text, r"(?m)^cpu_simd .* yes$")


class Terminals(CliTest):
    LONG = tuple("bench --backend cpu_simd --seconds 0.2 --threads 1 --s_q 1 --h_q 1,2 --prefix 16".split())

    def on_terminal(self, *args, **kwargs):
        """Runs with standard error on a pseudo-terminal; returns (exit code, stdout, what the terminal got)."""
        try:
            master, slave = pty.openpty()
        except OSError as error:  # a container without /dev/pts
            self.skipTest(f"no pseudo-terminal here: {error}")
        process = subprocess.Popen([TREEMLA, *args], stdout=subprocess.PIPE, stderr=slave, **kwargs)
        os.close(slave)
        seen, out = b"", b""
        while True:
            ready, _, _ = select.select([master, process.stdout], [], [], TIMEOUT)
            self.assertTrue(ready, "no output")
            if master in ready:
                try:
                    seen += os.read(master, 65536)
                except OSError:  # the other end is closed
                    break
            if process.stdout in ready:
                out += os.read(process.stdout.fileno(), 65536)
        out += process.stdout.read()
        process.stdout.close()
        os.close(master)
        return process.wait(TIMEOUT), out.decode(), seen.decode()

    def test_progress_on_a_terminal_and_erased(self):
        env = dict(os.environ, TERM="xterm")
        code, out, seen = self.on_terminal(*self.LONG, env=env)
        self.assertEqual(code, 0)
        self.assertRegex(seen, r"\[[#.]{24}\] +\d+%")
        self.assertIn("eta", seen)
        self.assertTrue(seen.endswith("\r\x1b[K"), repr(seen[-40:]))
        self.assertNotIn("\n", seen)
        self.assertNotIn("\x1b", out)

    def test_no_progress_elsewhere(self):
        self.assertEqual(treemla("verify", SMALL_CASE).stderr, "")
        _, _, seen = self.on_terminal("verify", SMALL_CASE, env=dict(os.environ, TERM="dumb"))
        self.assertEqual(seen, "")

    def test_a_reader_who_leaves_early(self):
        # `treemla bench | head -1`
        process = subprocess.Popen([TREEMLA, *self.LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(TIMEOUT), 0)
        self.assertEqual(errors, b"")

    def test_verify_keeps_its_verdict_without_a_reader(self):
        header, buffer = read_safetensors(SMALL_CASE)
        poke(buffer, header, "expected_out", 0, "f", 1000.0)
        path = self.path("wrong.kdtr")
        write_safetensors(path, header, buffer)
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            result = subprocess.run([TREEMLA, "verify", path], stdout=write_end, stderr=subprocess.PIPE,
                                    timeout=TIMEOUT)
        finally:
            os.close(write_end)
        self.assertEqual((result.returncode, result.stderr), (1, b""))

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_full_disk_is_an_error(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run([TREEMLA, "info"], stdout=full, stderr=subprocess.PIPE, text=True,
                                    timeout=TIMEOUT)
        self.assertEqual(result.returncode, 2)
        self.assertIn("can't write to standard output: No space left", result.stderr)
        result = treemla("bench --seconds 0.01 --s_q 1 --h_q 1 --prefix 8 --csv /dev/full")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--csv /dev/full", result.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
