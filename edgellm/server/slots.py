"""llama-server's /slots: what runs, and the cache of a slot saved, restored or erased.

A slot is a seat: one of the sequences that run together. Its cache is what is kept of the last
request that ended in it. What is restored goes into the cache that all seats share, so the next
prompt that begins with it goes on from there whatever its seat.
"""

from __future__ import annotations

import time
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.kv_file import KVFileError
from edgellm.loop import Seat
from edgellm.server.body import read
from edgellm.server.errors import ApiError
from edgellm.server.models import serving
from edgellm.server.parameters import salt_of
from edgellm.server.reply_schemas import Slot, SlotDone
from edgellm.server.schemas import SlotRequest
from edgellm.server.service import in_thread
from edgellm.session import NAME, RESERVED


async def slots(http: HttpRequest) -> Response:
    """What runs: numbers only, never what anybody wrote."""
    engine = (await serving(http, http.query_params.get("model"))).engine
    running, n = {s.row: s for s in engine.running}, engine.llm.max_num_seqs
    if http.query_params.get("fail_on_no_slot") and len(running) >= n:
        return ApiError(503, "No slot is free.").response()
    found: list[Slot] = [{"id": i, "is_processing": i in running} for i in range(n)]
    for i, s in running.items():
        if 0 <= i < n:
            found[i]["n_prompt"], found[i]["n_computed"] = s.n_prompt, s.n_computed
            found[i]["n_decoded"] = len(s.tokens) - s.n_prompt
    return JSONResponse(found)


async def act(http: HttpRequest) -> Response:
    """save, restore or erase."""
    body = await read(http, SlotRequest)
    service = await serving(http, http.query_params.get("model"))
    folder, llm = service.slot_dir, service.engine.llm
    if folder is None:
        raise ApiError(403, "Slots are not saved here: start the server with --slot-save-path.")
    number, action = http.path_params["id"], http.query_params.get("action")
    if not (number.isascii() and number.isdecimal() and int(number[:9]) < llm.max_num_seqs):
        raise ApiError(404, f"There is no such slot: there are {llm.max_num_seqs}, from 0.")
    if action not in ("save", "restore", "erase"):
        raise ApiError(400, "action must be save, restore or erase.", param="action")
    salt, client = salt_of(http, body.cache_salt), salt_of(http, None)
    seat = llm.seats.get(int(number), Seat([], client))
    if not seat.salt.startswith(client):  # what another client's requests left there
        seat = Seat([], client)
    done: SlotDone = {"id_slot": int(number)}
    if action == "erase":
        n = await in_thread(lambda: llm.erase_cache(*seat)) if seat.tokens else 0
        done["n_erased"] = n
        return JSONResponse(done)
    path = _path(folder, client, body.filename)
    begun = time.perf_counter()
    try:
        if action == "restore":
            if not path.is_file():
                raise ApiError(404, "There is no such file.", param="filename")
            n = await in_thread(lambda: llm.load_cache(path, salt))
            done["n_restored"], done["n_read"] = n, path.stat().st_size
        else:
            if not seat.tokens:
                raise ApiError(400, "No request of yours has ended in this slot.")
            n = await in_thread(lambda: llm.save_cache(path, *seat))
            done["n_saved"], done["n_written"] = n, path.stat().st_size
    except KVFileError as error:  # its path is nobody's business
        raise ApiError(400, str(error).replace(str(path), path.name), param="filename") from None
    done["filename"] = path.name
    done["timings"] = {f"{action}_ms": 1e3 * (time.perf_counter() - begun)}
    return JSONResponse(done)


def _path(folder: Path, client: str, name: str | None) -> Path:
    """Where a file lies; clients with keys have folders of their own."""
    if name is None:
        raise ApiError(400, "filename is missing.", param="filename")
    if not NAME.fullmatch(name) or name.endswith(".") or RESERVED.fullmatch(name):
        raise ApiError(
            400, "filename: letters, digits, '-', '_' and '.', at most 64, and no folder.",
            param="filename",
        )  # fmt: skip
    if key := client.strip("/"):
        folder = folder / key[:16]
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / name
