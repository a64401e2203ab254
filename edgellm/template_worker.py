"""The process in which templates of unknown origin are rendered: `python -m` this module.

Requests come on stdin and answers go to stdout, each a line of JSON. The process limits itself:
memory by RLIMIT_AS, and a timer of the system ends it when a render does not come to an end, also
when the parent is gone. After a fault that may have left it damaged it ends by itself, and the
parent starts another.

It is ready when it has written its first line.
"""

import contextlib
import json
import os
import sys
from collections import OrderedDict
from datetime import datetime
from typing import Any

from edgellm.template_engine import Fault, compile_source, run

MEMORY = 64 << 20  # bytes that rendering may take on top of what the imports took
MAX_PROMPT = 8 << 20  # characters; up to four bytes each, and once more while they are joined
KEPT = 4  # compiled templates
LAST_RESORT = 4.0  # seconds; the parent's own limit is far shorter


def limit() -> None:
    """Take away what a template can need no more of. What a system lacks stays unlimited here;
    the parent watches as well."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_AS": _mapped() + MEMORY}
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None and value is not None:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (value, value))


def _mapped() -> int:
    """Bytes of address space in use."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().vms)


def _timer(seconds: float) -> None:
    """End this process after so long, without any code of ours: a loop in C hears no Python."""
    with contextlib.suppress(ImportError, AttributeError):
        import signal

        signal.setitimer(signal.ITIMER_REAL, seconds)


def answer(request: dict[str, Any], compiled: OrderedDict[str, Any]) -> dict[str, Any]:
    """{"text"} or {"fault", "undefined", "damaged"}. Without a context: only compile."""
    source = request["source"]
    try:
        template = compiled.get(source)
        if template is None:
            template = compiled[source] = compile_source(source)
            if len(compiled) > KEPT:
                compiled.popitem(last=False)
        if request["context"] is None:
            return {"text": ""}
        now = datetime.fromisoformat(request["now"])
        return {"text": run(template, request["context"], now, MAX_PROMPT)}
    except Fault as fault:
        damaged = isinstance(fault.__cause__, MemoryError | RecursionError)
        return {"fault": fault.text, "undefined": fault.undefined, "damaged": damaged}


def main() -> None:
    """Serve until stdin ends."""
    # Answers go to the stdout we were given; a stray print must not become one.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    compiled: OrderedDict[str, Any] = OrderedDict()
    compile_source("{{ messages }}").render(messages=[])  # what is imported on first use
    limit()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        _timer(LAST_RESORT)
        try:
            reply = answer(json.loads(line), compiled)
            text = json.dumps(reply)
        except MemoryError:
            reply = {"fault": "The chat template needs more memory than a template may use."}
            reply |= {"undefined": False, "damaged": True}
            text = json.dumps(reply)
        out.write(text + "\n")
        out.flush()
        _timer(0)
        if reply.get("damaged"):
            break


if __name__ == "__main__":
    main()
