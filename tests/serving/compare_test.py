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
    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, body):
            self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
        def do_GET(self):
            self.reply({})
        def do_POST(self):
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


def compare(tmp_path, **environment):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(SERVER))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.run(
        [sys.executable, SCRIPT, "--model", "m", "--prompts", "12", "--tokens", "8", "--port", str(port), "--out", tmp_path / "out"],  # noqa: E501
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
