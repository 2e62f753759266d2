#!/usr/bin/env python3
"""tools/remote against a real sshd on the loopback, with throw-away keys and a small tree that stands for the project.

Needs sshd, ssh, rsync, cmake and ninja; exit code 77 without them.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "remote"
SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
ME = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()

# What the tool finds in the tree. build.sh stands for the compiler, so that a build takes no time.
TREE = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.25)
        project(fake LANGUAGES NONE)
        add_custom_target(fake ALL COMMAND ./build.sh WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} VERBATIM)
        """,
    "CMakePresets.json": """
        {"version": 6,
         "configurePresets": [{"name": "default", "generator": "Ninja", "binaryDir": "${sourceDir}/build"}],
         "buildPresets": [{"name": "default", "configurePreset": "default"}]}
        """,
    ".gitignore": """
        /build*/
        *.pyc
        """,
    "build.sh": """
        #!/bin/sh
        cp fake_command build/treemla
        """,
    # treemla verify cases | treemla bench --csv FILE --json FILE
    "fake_command": """
        #!/bin/sh
        case "$1 $2" in
          "verify cases") [ -e cases/a.kdtr ] && echo "1 of 1 cases passed" ;;
          "bench --csv") printf 'backend,warm_us\\nfake,1.5\\n' >"$3" && echo '{"rows": [1]}' >"$5"; echo "1 row" ;;
          *) echo "unexpected: $*"; exit 2 ;;
        esac
        """,
    "scripts/setup": """
        #!/bin/sh
        echo "setup: everything for '$1' is here"
        """,
    "cases/a.kdtr": "a case",
    "src/a.cpp": "int a;",
    "junk.pyc": "ignored",
    "build-other/object.o": "ignored",
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = textwrap.dedent(text).lstrip("\n")
    path.write_text(text)
    path.chmod(0o755 if text.startswith("#!") else 0o644)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


class Sshd:
    """An sshd of this user on a free port of the loopback, whose sessions find `bin` first on their PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for key in ("host_key", "user key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        shutil.copy(folder / "user key.pub", folder / "authorized_keys")
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd refuses to start as root without it
        for _ in range(5):  # another program may take the port first
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            if self.start():
                return
        raise RuntimeError("sshd did not start: " + (folder / "sshd.log").read_text())

    def start(self):
        f = self.folder
        write(f / "sshd_config", f"""
            Port {self.port}
            ListenAddress 127.0.0.1
            HostKey {f}/host_key
            AuthorizedKeysFile {f}/authorized_keys
            StrictModes no
            UsePAM no
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            PermitRootLogin prohibit-password
            PidFile none
            SetEnv PATH={self.bin}:{os.environ["PATH"]}
            """)
        host_key = (f / "host_key.pub").read_text()
        (f / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        with open(f / "sshd.log", "w") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", f / "sshd_config"], stderr=log)

        def listens():
            with socket.socket() as probe:
                return self.process.poll() is not None or probe.connect_ex(("127.0.0.1", self.port)) == 0

        return wait_for(listens) and self.process.poll() is None

    def options(self):
        return [f"--port={self.port}", *self.keys("known_hosts")]

    def keys(self, known_hosts):
        options = ["IdentitiesOnly=yes", f'IdentityFile="{self.folder}/user key"', "GlobalKnownHostsFile=/dev/null",
                   f"UserKnownHostsFile={self.folder}/{known_hosts}"]
        return [f"--ssh-option={option}" for option in options]

    def sessions(self):
        """Process ids of the daemons of open connections."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def stop(self):
        self.process.terminate()
        self.process.wait()


class RemoteTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = pathlib.Path(tempfile.mkdtemp(prefix="treemla-remote-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.base, ignore_errors=True)
        cls.sshd = Sshd(cls.base)
        cls.addClassCleanup(cls.sshd.stop)
        write(cls.sshd.bin / "nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 570.86.15'\n")

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.base))
        self.tree = self.folder / "the tree"
        self.there = self.folder / "there"
        for name, text in TREE.items():
            write(self.tree / name, text)
        (self.tree / "tools").mkdir()
        shutil.copy(TOOL, self.tree / "tools" / "remote")
        self.nvcc(True)

    def nvcc(self, there):
        write(self.sshd.bin / "nvcc", f"""
            #!/bin/sh
            {'echo "Cuda compilation tools, release 12.8, V12.8.93"' if there else 'exit 127'}
            """)

    def command(self, *arguments, host=f"{ME}@127.0.0.1", there=None):
        return [sys.executable, self.tree / "tools" / "remote", *self.sshd.options(), *arguments, "--", host,
                str(there or self.there)]

    def remote(self, *arguments, code, **places):
        """Runs the tool, which must exit with `code`; returns what it printed."""
        done = subprocess.run(self.command(*arguments, **places), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(done.returncode, code, done.stdout)
        self.assertNotIn("Traceback", done.stdout)
        return done.stdout

    def records(self):
        """Everything below bench/records/, unfinished folders included."""
        return sorted((self.tree / "bench" / "records").glob("*/*"))

    def hang(self, ignore=""):
        """Makes the build start two processes that never end."""
        write(self.tree / "build.sh", f"""
            #!/bin/sh
            trap '' {ignore}
            sleep 1000 &
            echo $! >build/pids
            echo $$ >>build/pids
            while :; do sleep 1000; done
            """)

    def pids(self):
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self.there / "build" / "pids").read_text().split()]
        return []

    def assert_ended(self):
        pids = self.pids()
        self.assertEqual(len(pids), 2)
        self.assertTrue(wait_for(lambda: not any(map(alive, pids))), f"still running: {pids}")

    def test_all_well(self):
        said = self.remote(code=0)
        stages = ["connect", "copy", "setup", "build", "verify", "benchmark", "records"]
        for number, name in enumerate(stages, 1):
            self.assertRegex(said, rf"(?m)^\[{number}/7\] {name} +\d+\.\d s")
        self.assertIn("NVIDIA H200, 570.86.15", said)
        self.assertIn("1 of 1 cases passed", said)

        record, = self.records()
        self.assertEqual(record.parent.name, "h200")
        self.assertIn(f"bench/records/h200/{record.name}", said)
        self.assertEqual((record / "bench.csv").read_text(), "backend,warm_us\nfake,1.5\n")
        self.assertEqual(json.loads((record / "bench.json").read_text()), {"rows": [1]})
        self.assertEqual((record / "verify.txt").read_text(), "1 of 1 cases passed\n")
        run = json.loads((record / "run.json").read_text())
        self.assertEqual((run["gpu"], run["driver"], run["nvcc"], run["command"]),
                         ("NVIDIA H200", "570.86.15", "12.8", "build/treemla bench"))
        self.assertEqual(list(run["stages_s"]), stages[:-1])
        self.assertEqual(sorted(file.name for file in record.iterdir()),
                         ["bench.csv", "bench.json", "benchmark.txt", "run.json", "verify.txt"])

    def test_second_run_mirrors_the_tree_and_keeps_both_records(self):
        write(self.tree / "bench_kernels", TREE["fake_command"].replace('"$1 $2"', '"bench $1"').replace("$5", "$4")
              .replace("$3", "$2"))
        self.remote(code=0)
        self.assertFalse((self.there / "junk.pyc").exists())
        self.assertFalse((self.there / "build-other").exists())
        (self.tree / "src" / "a.cpp").unlink()
        write(self.tree / "src" / "b.cpp", "int b;")
        write(self.there / "build-mine" / "b.o", "not of this tree")
        # Edited, at a time before the last build.
        write(self.tree / "build.sh", "#!/bin/sh\ncp fake_command build/treemla; cp bench_kernels build\n")
        os.utime(self.tree / "build.sh", (1e9, 1e9))
        unchanged = (self.there / "scripts" / "setup").stat().st_mtime
        self.remote(code=0)
        self.assertEqual(sorted(file.name for file in (self.there / "src").iterdir()), ["b.cpp"])
        self.assertTrue((self.there / "build-mine" / "b.o").exists())
        self.assertGreater((self.there / "build.sh").stat().st_mtime, time.time() - 100)
        self.assertEqual((self.there / "scripts" / "setup").stat().st_mtime, unchanged)
        commands = [json.loads((record / "run.json").read_text())["command"] for record in self.records()]
        self.assertCountEqual(commands, ["build/treemla bench", "build/bench_kernels"])

    def test_odd_folder_name(self):
        there = self.folder / """-e it's a "b" $HOME `c` *"""
        self.remote("--no-bench", code=0, there=there)
        self.assertTrue((there / "build" / "treemla").exists())

    def test_no_bench(self):
        said = self.remote("--no-bench", code=0)
        self.assertIn("[5/5] verify", said)
        self.assertNotIn("benchmark", said)
        self.assertEqual(self.records(), [])

    @unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
    def test_compiler_error(self):
        write(self.tree / "CMakeLists.txt", """
            cmake_minimum_required(VERSION 3.25)
            project(fake LANGUAGES CXX)
            add_library(broken OBJECT src/a.cpp)
            """)
        write(self.tree / "src" / "a.cpp", "int a = no_such_name;")
        said = self.remote(code=1)
        self.assertRegex(said, r"\[4/7\] build +\d+\.\d s  FAILED: exit code 1")
        self.assertRegex(said, r"src/a.cpp:1:9: error: .*no_such_name")
        self.assertNotIn("[5/7]", said)
        self.assertEqual(self.records(), [])

    def test_error_far_above_the_end(self):
        write(self.tree / "build.sh", """
            #!/bin/sh
            echo "a.cpp:1:9: error: what matters"
            seq 1000
            exit 1
            """)
        said = self.remote(code=1)
        self.assertIn("error: what matters", said)
        self.assertIn("\n1000\n", said)
        self.assertNotIn("\n500\n", said)
        log = pathlib.Path(said.splitlines()[-1].rpartition(": ")[2])
        self.assertIn("\n500\n", log.read_text())
        log.unlink()

    def test_hanging_build(self):
        for ignore in ["HUP", "TERM HUP INT"]:
            with self.subTest(ignored=ignore):
                self.hang(ignore)
                start = time.monotonic()
                said = self.remote("--stage-timeout=build=3", code=1)
                self.assertLess(time.monotonic() - start, 30)
                self.assertRegex(said, r"\[4/7\] build +\d+\.\d s  FAILED: not done after 3 s, its time limit")
                self.assertRegex(said, "ended: .*build.sh")  # what hangs
                self.assert_ended()
                (self.there / "build" / "pids").unlink()

    def test_interrupted_and_killed(self):
        self.hang()
        for number, code in [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]:
            with self.subTest(number.name), subprocess.Popen(self.command(), stdout=subprocess.DEVNULL,
                                                             stderr=subprocess.DEVNULL) as tool:
                self.assertTrue(wait_for(lambda: len(self.pids()) == 2, 30))
                tool.send_signal(number)
                self.assertEqual(tool.wait(30), code)
                self.assert_ended()
                (self.there / "build" / "pids").unlink()

    def test_broken_connection(self):
        self.hang()
        with subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tool:
            self.assertTrue(wait_for(lambda: len(self.pids()) == 2, 30))
            for pid in self.sshd.sessions():
                os.kill(pid, signal.SIGKILL)
            said = tool.communicate(timeout=30)[0]
        self.assertEqual(tool.returncode, 1, said)
        self.assertIn("FAILED: the connection broke", said)
        self.assert_ended()

    def test_failing_stages(self):
        fake = TREE["fake_command"]
        for name, file, text, message in [
            ("setup", "scripts/setup", "#!/bin/sh\necho 'setup: missing: a compiler' >&2; exit 2\n", "missing: a compiler"),
            ("verify", "fake_command", "#!/bin/sh\necho 'case a: FAIL'; exit 1\n", "case a: FAIL"),
            ("benchmark", "fake_command", fake.replace('"1 row"', '"no row"; exit 3'), "no row"),
            ("records", "fake_command", fake.replace("fake,1.5", "fake"), "not whole"),
            ("records", "fake_command", fake.replace("[1]}", "["), "not whole"),
        ]:
            with self.subTest(name, file=file):
                write(self.tree / file, text)
                said = self.remote(code=1)
                self.assertRegex(said.splitlines()[0], "connect")
                self.assertRegex(said, rf"\] {name} +\d+\.\d s  FAILED")
                self.assertIn(message, said)
                self.assertEqual(self.records(), [])
                write(self.tree / file, TREE[file])

    def test_gpu_without_nvcc(self):
        self.nvcc(False)
        self.assertIn("no nvcc", self.remote(code=1))

    def test_foreign_folders_are_left_alone(self):
        write(self.there / "thesis.tex", "years of work")
        self.assertIn("thesis", os.listdir(self.there)[0])
        self.assertIn("which it would delete", self.remote(code=2))
        self.assertEqual((self.there / "thesis.tex").read_text(), "years of work")
        for there in ["/", "~", ".", "/proc/no/such"]:
            with self.subTest(there):
                self.assertIn("remote: can't use", self.remote(code=2, there=there))
        self.assertIn("printable", self.remote(code=2, there="a\nb"))

    def test_unusable_hosts(self):
        trace = self.folder / "trace"
        for host in [f"-oProxyCommand=touch {trace}", f"a;touch {trace}", f"$(touch {trace})", "a b", "a/b", "", "a:b",
                     "me@-h", "me@", "@a", "[::1", "a\n"]:
            with self.subTest(host):
                self.assertIn("remote: host", self.remote(code=2, host=host))
        self.assertFalse(trace.exists())

    def test_unusable_options(self):
        for option in ["--timeout=0", "--timeout=x", "--stage-timeout=bild=3", "--port=70000", "--ssh-option=-F/x", "--x"]:
            with self.subTest(option):
                self.assertIn(option.strip("-").split("=")[0], self.remote(option, code=2))

    def test_unreachable(self):
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            said = self.remote(f"--port={nobody.getsockname()[1]}", code=2)
        self.assertIn("can't reach", said)
        self.assertIn("refused", said)
        with socket.socket() as silent:  # takes the connection and says nothing
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            said = self.remote(f"--port={silent.getsockname()[1]}", "--stage-timeout=connect=1", code=2)
        self.assertIn("no answer in 1 s", said)

    def test_never_prompts(self):
        command = [sys.executable, self.tree / "tools" / "remote", f"--port={self.sshd.port}", *self.sshd.keys("no_hosts"),
                   f"{ME}@127.0.0.1", str(self.there)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("Host key verification failed", done.stderr)

    def test_missing_programs(self):
        for missing in ["ssh", "rsync"]:
            programs = self.folder / f"without {missing}"
            programs.mkdir()
            for name in {"ssh", "rsync"} - {missing}:
                (programs / name).symlink_to(shutil.which(name))
            done = subprocess.run(self.command(), env={"PATH": str(programs)}, capture_output=True, text=True)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"no {missing} on this machine", done.stderr)

    def test_gpu_folders(self):
        loader = importlib.machinery.SourceFileLoader("remote", str(TOOL))
        tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("remote", loader))
        sys.dont_write_bytecode = True
        loader.exec_module(tool)
        for name, folder in {
            "NVIDIA H200": "h200",
            "NVIDIA H100 80GB HBM3": "h100",
            "NVIDIA H100 PCIe": "h100_pcie",
            "NVIDIA A100-SXM4-80GB": "a100",
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
            "NVIDIA GeForce RTX 5090": "rtx_5090",
            "../../etc": "etc",
            "": "gpu",
        }.items():
            self.assertEqual(tool.gpu_folder(name), folder)


if __name__ == "__main__":
    needs = {"sshd": SSHD, **{name: shutil.which(name) for name in ("ssh", "ssh-keygen", "rsync", "cmake", "ninja")}}
    missing = [name for name, path in needs.items() if not path]
    if missing:
        print(f"skipped: no {', '.join(missing)} here (on Debian and Ubuntu: openssh-server and rsync have the first four)")
        sys.exit(77)
    unittest.main()
