"""The child program of LocalBackend: llama.cpp's HTTP server on a free port of this machine.

The program reads one line of JSON from standard input (gguf, slots, context, key), prints one line, `READY <url>` or
`FAILED <reason>`, and serves until the end of its input: the end of the parent in any way ends the child. The key is
passed by standard input because other users can read argv and environment. Run by path, with the standard library and
xllamacpp only.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def watch_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def start(config: dict[str, Any]) -> Any:
    import xllamacpp  # type: ignore[import-untyped]  # noqa: PLC0415 - main() redirects its output first

    module: Any = xllamacpp
    params = module.CommonParams()
    params.model.path = config["gguf"]
    params.model_alias = {Path(config["gguf"]).name}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.api_keys = [config["key"]]
    params.n_parallel = config["slots"]
    params.n_ctx = config["slots"] * config["context"]
    # The server checks for cancelled requests between two batches of the prompt.
    params.n_batch = 512
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # More threads spend more time waiting for each other than computing.
    threads = min(cores, 8)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    # With the prompt cache, equal prompts get different answers, even at temperature 0.
    params.cache_prompt = False
    params.ui = False
    params.verbosity = 0
    return module.Server(params)


def main() -> None:
    # The server also writes to standard output; the parent stops reading the pipe after the first line.
    answer = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    config = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=watch_parent, daemon=True).start()
    try:
        server = start(config)
    except Exception as exc:
        os.write(answer, f"FAILED {type(exc).__name__}: {exc}".replace("\n", " ").encode() + b"\n")
        os._exit(1)
    os.write(answer, f"READY {server.listening_address}\n".encode())
    os.close(answer)
    threading.Event().wait()


if __name__ == "__main__":
    main()
