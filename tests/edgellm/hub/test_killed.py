"""`edgellm pull` killed fifty times at random moments, and resumed."""

import os
import random
import subprocess
import sys
import time

import pytest

from .fake import Fault, blob

SCRIPT = """
import sys
from edgellm.hub import pull, remote
remote.POLICY = remote.Policy(timeout=0.5, tries=8, first_pause=0.01, longest_pause=0.02)
print("ready", flush=True)
pull(sys.argv[1])
"""
PATH = "/m.gguf"
KILLS = 50


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_fifty_times_and_resumed(server, cache):
    rng = random.Random(7)
    data = server.files[PATH] = blob(40 << 20)
    server.pace = 0.004  # 16 MB/s
    kills = rounds = 0
    while kills < KILLS:  # what comes through in one life is removed and begun again
        rounds += 1
        for folder in cache.glob("models/url/*"):
            for path in folder.iterdir():
                path.unlink()
        done = False
        while not done and kills < KILLS:
            if rng.random() < 0.3:
                server.fault(PATH, Fault("cut", rng.randrange(1, 1 << 20)))
            done = not live(server.url + PATH, rng.uniform(0, 0.4))
            kills += not done
            finals = list(cache.glob("models/**/m.gguf"))
            assert all(path.read_bytes() == data for path in finals)
    server.pace = 0.0
    live(server.url + PATH, 60)
    files = [path for path in cache.glob("models/**/*") if path.is_file()]
    names = sorted(path.name for path in files if path.suffix != ".json")
    assert names == ["m.gguf"] and len(files) == 2  # the model and its record
    assert next(path for path in files if path.name == "m.gguf").read_bytes() == data
    resumed = [headers for headers in server.requests(PATH) if "range" in headers]
    assert len(resumed) > KILLS // 3


def live(url: str, seconds: float) -> bool:
    """Run a pull and kill it after a time; whether it had to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    killed = process.poll() is None
    process.kill()
    out, err = process.communicate()
    assert killed or process.returncode == 0, err.decode()
    return killed
