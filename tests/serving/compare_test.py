"""scripts/serving_compare against a server that answers as SGLang does."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "serving_compare"

SERVER = """
    import http.server, json, os, sys
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if options["--attention-backend"] == os.environ.get("BROKEN"):
        sys.exit("no such backend")
    if options["--attention-backend"] == os.environ.get("CHILD"):
        child = os.fork()
        if child:
            open(os.environ["CHILD_FILE"], "w").write(str(child))
        else:
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()
    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, body):
            self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
        def do_GET(self):
            self.reply({})
        def do_POST(self):
            if os.environ.get("BREAKS") == options["--attention-backend"]:
                os._exit(1)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            n = body["sampling_params"]["max_new_tokens"]
            ids = [(7 * i + len(body["text"])) % 50 for i in range(n)]
            if os.environ.get("DIFFERENT") == options["--attention-backend"] and "moon" in body["text"]:
                ids[3] = 99
            self.reply({"text": "", "output_ids": ids, "meta_info": {"completion_tokens": n, "spec_verify_ct": n // 2}})
        def log_message(self, *args):
            pass
    http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def compare(tmp_path, *options, **environment):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(SERVER))
    if "--port" not in options:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options += ("--port", str(free.getsockname()[1]))
    return subprocess.run(
        [sys.executable, SCRIPT, "--model", "m", "--prompts", "12", "--tokens", "8", *options, "--out", tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)} | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_equal_outputs(tmp_path):
    done = compare(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "12 of 12 outputs are equal" in done.stdout and "96 tokens" in done.stdout and "2.00 tokens a verify step" in done.stdout
    )


def test_a_difference_is_found_and_placed(tmp_path):
    done = compare(tmp_path, DIFFERENT="treemla")
    assert done.returncode == 1 and "prompt 2: differs at token 3" in done.stdout, done.stdout + done.stderr
    assert "11 of 12 outputs are equal" in done.stdout


def test_a_server_that_does_not_start(tmp_path):
    done = compare(tmp_path, BROKEN="treemla")
    assert done.returncode == 2 and "treemla.log" in done.stderr
    assert "no such backend" in (tmp_path / "out" / "treemla.log").read_text()


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = compare(tmp_path, "--port", port)
    assert done.returncode == 2 and f"port = {port}: " in done.stderr and "must be free" in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_server_that_breaks_off(tmp_path):
    done = compare(tmp_path, BREAKS="triton")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("serving_compare: triton: ") and "triton.log" in done.stderr


def test_what_a_server_started_is_ended_with_it(tmp_path):
    child = tmp_path / "child"
    done = compare(tmp_path, CHILD="treemla", CHILD_FILE=str(child))
    assert done.returncode == 0, done.stdout + done.stderr
    state = pathlib.Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_draft_tokens_are_ngrams(tmp_path):
    assert compare(tmp_path).stdout.count("--speculative-num-draft-tokens 16") == 2
    other = tmp_path / "eagle"
    other.mkdir()
    assert "num-draft-tokens" not in compare(other, "--speculative", "EAGLE").stdout
