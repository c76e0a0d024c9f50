"""The LoRA adapters of a worker: read from disk, loaded, listed in its record, unloaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from baton.engine.adapters import LoraAdapter
from baton.engine.build import Loaded
from baton.engine.engine import Engine
from baton.engine.models.lora import load_lora
from baton.errors import (
    BatonError,
    CheckpointError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    quoted,
)
from baton.net.tasks import uninterrupted
from baton.v1.common_pb2 import WORKER_STATE_READY, Adapter, WorkerRecord

log = logging.getLogger(__name__)
MAX_NAME_CHARS = 256
LOADED, FAILED = "loaded", "failed"


class Adapters:
    """Adapters by name. Names with equal content share memory. Event loop only."""

    def __init__(
        self,
        engine: Engine,
        loaded: Loaded,
        publish: Callable[[list[Adapter]], Awaitable[None]],
        count: Callable[[str], None],
    ) -> None:
        """publish: tells routers which adapters there are. count: gets LOADED or FAILED."""
        self._engine, self._loaded, self._publish, self._count = engine, loaded, publish, count
        self._named: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()

    async def load(self, name: str, directory: Path) -> Adapter:
        """Loads an adapter, unless it is loaded by this name.

        Raises InvalidRequest, Overloaded when there is no place for it.
        """
        try:
            adapter = await self._load(name, directory)
        except BatonError:
            self._count(FAILED)
            raise
        self._count(LOADED)
        return adapter

    async def _load(self, name: str, directory: Path) -> Adapter:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"a name has 1 to {MAX_NAME_CHARS} characters", "name")
        if "@" in name or "#" in name:
            raise InvalidRequest(
                "a name has no @ and no #, which stand in names of versions", "name"
            )
        if not directory.is_absolute():
            raise InvalidRequest("the directory's whole path is needed", "directory")
        async with self._changing:
            # To the end even if the caller hangs up: the engine goes on with its part anyway.
            return await uninterrupted(self._place(name, directory))

    async def _place(self, name: str, directory: Path) -> Adapter:
        adapter = await asyncio.to_thread(self._read, directory)
        if (held := self._named.get(name)) is not None:
            if held.identity == adapter.identity:
                return held
            raise InvalidRequest(
                f"another adapter is loaded as {name}: unload it first, or take another name",
                "name",
            )
        if not self._names_of(adapter.identity):
            await asyncio.wrap_future(self._engine.load_adapter(adapter))
        self._named[name] = made = Adapter(
            name=name,
            identity=adapter.identity,
            rank=adapter.rank,
            directory=str(directory),
        )
        log.info("loaded adapter %s from %s, rank %d", name, directory, adapter.rank)
        await self._publish(list(self._named.values()))
        return made

    async def load_as(self, records: Iterable[WorkerRecord]) -> None:
        """Loads the adapters that other workers of the same model have, as far as it can.

        So a worker that joins, or is started again, serves what was loaded by call before.
        """
        fingerprint = self._loaded.descriptor.model_fingerprint
        others = [
            adapter
            for record in records
            if record.state == WORKER_STATE_READY and record.kv.model_fingerprint == fingerprint
            for adapter in record.adapters
        ]
        for adapter in others:
            if adapter.name in self._named or not self._loaded.settings.lora_slots:
                continue
            try:
                await self.load(adapter.name, Path(adapter.directory))
            except BatonError as error:
                log.warning("adapter %s of other workers is not loaded: %s", adapter.name, error)

    async def unload(self, name: str, wait_s: float) -> None:
        """Unloads an adapter once no sequence uses it.

        Raises ModelNotFound, and Unavailable if sequences use it for too long: then it stays.
        """
        async with self._changing:
            await uninterrupted(self._take_away(name, wait_s))

    async def _take_away(self, name: str, wait_s: float) -> None:
        if (adapter := self._named.get(name)) is None:
            raise ModelNotFound(f"no adapter {quoted(name)} is loaded here")
        if len(self._names_of(adapter.identity)) == 1:
            await self._remove(adapter, wait_s)
        else:
            await self._publish_without(name)
        del self._named[name]
        log.info("unloaded adapter %s", name)

    async def _remove(self, adapter: Adapter, wait_s: float) -> None:
        engine, identity = self._engine, adapter.identity
        retired: asyncio.Future[Future[None]] = asyncio.wrap_future(engine.retire_adapter(identity))
        unused = asyncio.wrap_future(await retired)
        kept = True
        try:
            await self._publish_without(adapter.name)
            await asyncio.wait({unused}, timeout=wait_s)
            kept = not unused.done()
        finally:
            if kept:
                users = engine.keep_adapter(identity)
                await self._publish(list(self._named.values()))
        if kept:
            count = await asyncio.wrap_future(users)
            raise Unavailable(
                f"{count} sequences still use adapter {adapter.name} after {wait_s:.0f} s: it "
                "stays loaded"
            )
        await asyncio.wrap_future(engine.remove_adapter(identity))

    async def _publish_without(self, name: str) -> None:
        await self._publish([one for one in self._named.values() if one.name != name])

    def _names_of(self, identity: str) -> list[str]:
        return [name for name, one in self._named.items() if one.identity == identity]

    def _read(self, directory: Path) -> LoraAdapter:
        loaded = self._loaded
        try:
            return load_lora(directory, loaded.model_config, loaded.settings.max_lora_rank)
        except CheckpointError as error:
            raise InvalidRequest(str(error), "directory") from error
