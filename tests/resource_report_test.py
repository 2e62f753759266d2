#!/usr/bin/env python3
"""scripts/resource_report on recorded compiler output, a stand-in compiler and a stand-in build folder."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "resource_report"

loader = importlib.machinery.SourceFileLoader("resource_report", str(SCRIPT))
tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("resource_report", loader))
sys.modules["resource_report"] = tool
sys.dont_write_bytecode = True
loader.exec_module(tool)

KEY = "_ZN7treemla4cuda19warp_per_key_kernelINS0_6ConfigILi576ELb1EEEEEvPKfPfi"  # warp_per_key_kernel<Config<576, true>>
SPILL = "_ZN7treemla12_GLOBAL__N_111tile_kernelIfEEvPKf"                          # tile_kernel<float>
HELPER = "_ZN34_INTERNAL_0a1d0c3e_4_a_cu_acc5a52f6helperEf"                       # helper

# nvcc 13.0 -Xptxas -v, shortened.
CLEAN = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{KEY}' for 'sm_80'
ptxas info    : Function properties for {KEY}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2304 bytes smem, 372 bytes cmem[0]
ptxas info    : Compile time = 1.726 ms
ptxas info    : Function properties for {HELPER}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{KEY}' for 'sm_120'
ptxas info    : Function properties for {KEY}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 2304+16 bytes smem
ptxas info    : Compile time = 2.341 ms
"""
SPILLING = f"""\
ptxas info    : Compiling entry function '{SPILL}' for 'sm_90a'
ptxas info    : Function properties for {SPILL}
    336 bytes stack frame, 664 bytes spill stores, 688 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 336 bytes cumulative stack size
"""
SPILLING_HELPER = SPILLING.replace("336 bytes stack frame, 664 bytes spill stores, 688", "0 bytes stack frame, 0 bytes "
                                   "spill stores, 0") + f"""\
ptxas info    : Function properties for {HELPER}
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""
SERIALISED = SPILLING_HELPER.partition("ptxas info    : Function properties for " + HELPER)[0] + f"""\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in '{SPILL}'
"""
CUOBJDUMP = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {KEY}:
  REG:40 STACK:0 SHARED:2304 LOCAL:0 CONSTANT[0]:372 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_120

Resource usage:
 Function {KEY}:
  REG:48 STACK:16 SHARED:3328 LOCAL:0 CONSTANT[0]:916 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def budgets(key=None, **others):
    """warp_per_key_kernel fits 4 times on sm_120 with this budget, tile_kernel once on sm_90a."""
    key = {"threads": 256, "dynamic_smem": 22000, "min_blocks_per_sm": {"sm_120": 4}, **(key or {})}
    return {"kernels": {"warp_per_key_kernel": key, "tile_kernel<*>": {"threads": 256}}, **others}


class ResourceReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="treemla-resource-report-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def report(self, text, *options, code, budget=None):
        """Runs the tool on `text` (or a path), which must exit with `code`; returns what it printed."""
        path = text
        if isinstance(text, str):
            path = self.folder / "log"
            path.write_text(text)
        table = self.folder / "budgets.json"
        table.write_text(json.dumps(budget or budgets()))
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            got = tool.main([str(path), "--budgets", str(table), *options])
        self.assertEqual(got, code, out.getvalue())
        return out.getvalue()

    def test_ptxas(self):
        functions, notes = tool.parse_ptxas(CLEAN)
        self.assertEqual([(f.name, f.arch, f.kernel, f.registers, f.static_smem) for f in functions],
                         [(KEY, "sm_80", True, 40, 2304), (HELPER, "sm_80", False, 0, 0), (KEY, "sm_120", True, 48, 2320)])
        self.assertEqual(notes, [])
        spilling, = tool.parse_ptxas(SPILLING)[0]
        self.assertEqual((spilling.stack, spilling.spill_stores, spilling.spill_loads, spilling.registers),
                         (336, 664, 688, 255))

    def test_cuobjdump(self):
        small, stacked = tool.parse_cuobjdump(CUOBJDUMP)
        self.assertEqual((small.arch, small.registers, small.static_smem, small.spill_stores), ("sm_80", 40, 2304, 0))
        # The driver's 1,024 bytes are counted there from sm_90 on; what part of a stack is spilled is not told.
        self.assertEqual((stacked.arch, stacked.static_smem, stacked.stack, stacked.spill_stores),
                         ("sm_120", 2304, 16, None))
        self.assertIn("can't tell", self.report(CUOBJDUMP, "--check", code=1))

    def test_blocks_per_sm(self):
        for arch, registers, threads, smem, expected in [
            (90, 255, 256, 0, (1, "registers")),         # 8,192 registers a warp
            (90, 168, 384, 0, (1, "registers")),         # 5,376 a warp, 12 warps
            (120, 64, 256, 0, (4, "registers")),
            (120, 65, 256, 0, (3, "registers")),         # 2,304 a warp after rounding: 28 warps
            (120, 32, 256, 0, (6, "threads")),           # 1,536
            (90, 32, 256, 0, (8, "threads")),            # 2,048
            (120, 16, 32, 0, (24, "blocks")),
            (80, 16, 33, 0, (32, "blocks")),             # two warps each
            (120, 40, 256, 23 * 1024, (4, "smem")),      # 24 KB with the reserved one, of 100
            (120, 40, 256, 24 * 1024 + 1, (3, "smem")),
            (120, 40, 128, 70 * 1024, (1, "smem")),
            (120, 40, 128, 99 * 1024, (1, "smem")),
            (120, 40, 128, 99 * 1024 + 1, (0, "smem")),
            (90, 40, 128, 227 * 1024, (1, "smem")),
            (80, 40, 128, 164 * 1024, (0, "smem")),
        ]:
            with self.subTest(arch=arch, registers=registers, threads=threads, smem=smem):
                self.assertEqual(tool.blocks_per_sm(tool.LIMITS[arch], registers, threads, smem), expected)

    def test_table(self):
        said = self.report(CLEAN, code=0)
        head, *rows = said.splitlines()
        self.assertRegex(head, r"^kernel +arch +registers +threads +smem +stack +spills +blocks/SM +occupancy +limited by$")
        self.assertEqual([row.split()[2:] for row in rows],
                         [["sm_80", "40", "256", "24304", "0", "0", "6", "75%", "smem"],
                          ["sm_120", "48", "256", "24320", "0", "0", "4", "67%", "smem"]])
        self.assertTrue(all(row.startswith("warp_per_key_kernel<Config<576, true>>  sm_") for row in rows))
        self.assertNotIn("sm_80", self.report(CLEAN, "--arch", "sm_120", code=0))

    def test_json(self):
        rows = json.loads(self.report(CLEAN, "--json", code=0))["kernels"]
        self.assertEqual([(row["arch"], row["smem"], row["blocks_per_sm"], row["spill_stores"]) for row in rows],
                         [("sm_80", 24304, 6, 0), ("sm_120", 24320, 4, 0)])
        found = json.loads(self.report(SPILLING, "--json", "--check", code=1))
        self.assertEqual(len(found["faults"]), 1)
        self.assertEqual(found["kernels"][0]["spill_loads"], 688)

    def test_check(self):
        self.assertIn("2 kernels checked, 0 faults", self.report(CLEAN, "--check", code=0))
        timed = "compiled in 41.50 CPU seconds\n" + CLEAN
        for text, budget, fault in [
            (SPILLING, None, "tile_kernel<float>, sm_90a: spills 664 bytes of stores and 688 of loads"),
            (SPILLING_HELPER, None, "helper, sm_90a: spills 4 bytes of stores and 4 of loads"),
            (SERIALISED, None, "wgmma.mma_async instructions are serialized"),
            (CLEAN, budgets({"dynamic_smem": {"sm_120": 99 * 1024}}), "103696 bytes of shared memory, at most 101376"),
            (CLEAN, budgets({"dynamic_smem": 24000}), "sm_120: 3 blocks an SM by smem, at least 4 wanted"),
            (CLEAN, budgets({"threads": 1024, "min_blocks_per_sm": 2}), "sm_80: 1 blocks an SM by registers, at least 2"),
            (CLEAN, {"kernels": {}}, "warp_per_key_kernel<Config<576, true>>: no row in"),
            (timed, budgets(compile_cpu_seconds={"log": 40, "*": 90}), "log: compiled in 42 CPU seconds, 40 at most"),
        ]:
            with self.subTest(fault):
                self.assertRegex(self.report(text, "--check", code=1, budget=budget), "(?m)^FAULT .*" + re.escape(fault))
                self.report(text, code=0, budget=budget)  # only --check judges
        self.report(timed, "--check", code=0, budget=budgets(compile_cpu_seconds={"log": 42, "*": 1}))

    def test_architectures_without_launches(self):
        said = self.report(CLEAN, "--check", code=0, budget=budgets({"archs": ["sm_120"], "dynamic_smem": 22000}))
        self.assertIn("not launched here", said)

    def test_first_fitting_row_counts(self):
        table = {"kernels": {"k<float, *>": {"threads": 1}, "k": {"threads": 2}, "*": {"threads": 3}}}
        self.assertEqual([tool.find_budget(table, name)["threads"] for name in ["k<float, 4>", "k<half, 4>", "k", "kk"]],
                         [1, 2, 2, 3])
        self.assertIsNone(tool.find_budget({"kernels": {"k": {}}}, "kk<float>"))

    def test_the_project_s_table(self):
        self.assertIn("kernels", tool.read_budgets(tool.BUDGETS))

    def test_unusable_input(self):
        for text in ["", "nvcc fatal : no such file\n", self.folder, self.folder / "none"]:
            with self.subTest(text):
                self.assertIn("resource_report: ", self.report(text, code=2))
        for budget in [{"kernel": {}}, {"kernels": {"k": {}}}, {"kernels": {"k": {"threads": 1, "smem": 2}}}, [1]]:
            with self.subTest(budget):
                self.assertIn("budgets.json", self.report(CLEAN, code=2, budget=budget))

    def compiler(self, code=0):
        """A stand-in for nvcc that makes the object after -o."""
        path = self.folder / "nvcc"
        path.write_text(f"""#!/bin/sh
            echo "on stdout"
            cat >&2 <<'LOG'
{CLEAN}ptxas warning : a warning of ptxas
a.cu(3): warning #177-D: unused
LOG
            echo "$*" >{self.folder}/arguments
            while [ $# -gt 1 ]; do [ "$1" != -o ] || : >"$2"; shift; done
            exit {code}
            """)
        path.chmod(0o755)
        return str(path)

    def capture(self, *command):
        done = subprocess.run([sys.executable, SCRIPT, "--capture", *command], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def test_capture(self):
        object_path = self.folder / "a.cu.o"
        code, out, err = self.capture(self.compiler(), "-c", "a.cu", "-o", str(object_path))
        self.assertEqual((code, out), (0, "on stdout\n"))
        self.assertEqual(err, "ptxas warning : a warning of ptxas\na.cu(3): warning #177-D: unused\n")
        self.assertIn("-Xptxas -v", (self.folder / "arguments").read_text())
        kept = (self.folder / "a.cu.o.ptxas").read_text()
        self.assertRegex(kept, r"^compiled in \d+\.\d\d CPU seconds\n")
        self.assertEqual(tool.parse_ptxas(kept), tool.parse_ptxas(CLEAN))

    def test_capture_of_a_failure_and_of_another_command(self):
        object_path = self.folder / "a.cu.o"
        code, _, err = self.capture(self.compiler(7), "-c", "a.cu", "-o", str(object_path))
        self.assertEqual(code, 7)
        self.assertIn("unused", err)
        self.assertFalse((self.folder / "a.cu.o.ptxas").exists())
        code, _, err = self.capture(self.compiler(), "--version")
        self.assertEqual((code, (self.folder / "arguments").read_text()), (0, "--version\n"))

    def test_build_folder(self):
        build = self.folder / "build"
        (build / "src").mkdir(parents=True)
        object_path = build / "src" / "a.cu.o"
        log = build / "src" / "a.cu.o.ptxas"
        (build / "compile_commands.json").write_text(json.dumps([
            {"directory": str(build), "command": "c++ -o src/b.cpp.o -c b.cpp", "file": "/x/src/b.cpp"},
            {"directory": str(build), "command": "nvcc -c a.cu -o src/a.cu.o", "file": "/x/src/a.cu"},
            {"directory": str(build), "command": "nvcc -c t.cu -o t.cu.o", "file": "/x/tests/t.cu"}]))
        for name, value in {"ROOT": pathlib.Path("/x"), "find_cuobjdump": lambda: None}.items():
            self.addCleanup(setattr, tool, name, getattr(tool, name))
            setattr(tool, name, value)

        self.assertIn("is not built", self.report(build, code=2))
        object_path.touch()
        self.assertIn("has no a.cu.o.ptxas beside it", self.report(build, code=2))
        log.write_text("compiled in 3.00 CPU seconds\n" + CLEAN)
        self.assertIn("1 sources compiled in 3 CPU seconds, the slowest a.cu in 3", self.report(build, code=0))
        (build / "src" / "gone.cu.o.ptxas").write_text(SPILLING)  # of a source that is no more
        self.report(build, "--check", code=0)
        os.utime(log, (1, 1))  # older than the object: of an earlier compiler run
        self.assertIn("has no a.cu.o.ptxas", self.report(build, code=2))

        cuobjdump = self.folder / "cuobjdump"
        cuobjdump.write_text(f"#!/bin/sh\ncat <<'EOF'\n{CUOBJDUMP}\nEOF\n")
        cuobjdump.chmod(0o755)
        tool.find_cuobjdump = lambda: str(cuobjdump)
        self.assertIn("?", self.report(build, code=0).splitlines()[2])


if __name__ == "__main__":
    if shutil.which("c++filt") is None:
        print("skipped: no c++filt here")
        sys.exit(77)
    unittest.main()
