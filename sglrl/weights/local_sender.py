"""Weight updates from the driver's own process, as ``Client``'s methods request them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import check_timeout
from ..core.manifest import FLOAT_BYTES, is_computed
from ..errors import InvalidWeights
from ..wire.weights import ModelDescription, TensorSpec
from .channel import WeightChannel
from .deadline import Deadline, turn
from .safetensors_files import Checkpoint, fingerprint, read_checkpoint
from .update_report import UpdateReport
from .update_request import UpdateRequest

if TYPE_CHECKING:
    from .tensor_source import Manifest


class TensorMetadata(msgspec.Struct, frozen=True):
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: the dtype as torch prints it, without "torch.".
    """

    dtype: str
    shape: tuple[int, ...]


class LocalSender:
    """Sends weights from this process. Keeps its sending end, created at the first use."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._updates = channel.updates
        self._turn = asyncio.Lock()
        """Held by a call that uses or replaces the sending end."""
        self._end: Any = None
        self._manifest: Manifest | None = None

    async def close(self) -> None:
        self._forget_end()

    def _forget_end(self) -> None:
        if self._end is not None:
            self._updates.group.forget(self._end)
            self._end.close()
            self._end = None

    async def connect(self, device: Any, host: str | None, timeout: float) -> float:
        """Form the group before the first update. Return the duration in milliseconds."""
        deadline = Deadline(check_timeout(timeout))
        async with turn(self._turn, deadline):
            end = await self._ending(device, host, [], deadline)
            return await self._updates.join(end, deadline)

    async def update(
        self,
        weights: Any,
        request: UpdateRequest,
        *,
        device: Any = None,
        host: str | None = None,
    ) -> UpdateReport:
        """Send ``weights`` to the workers. The specs of ``weights`` replace ``request.specs``."""
        from .bucket_sender import Payload
        from .tensor_source import Manifest, take
        from .verification import check_ties

        request.check(self._channel.version)
        deadline = Deadline(request.timeout, request.begun)
        given = take(weights)
        wanted = await self._updates.describe(deadline)
        if self._manifest is None:
            self._manifest = Manifest()
        tensors = self._manifest.take(given.named, wanted)
        # Read the specs now, because another update may change them while this one waits.
        specs, total = self._manifest.specs, self._manifest.total
        await check_ties(self._manifest, given, self._channel.checksums, wanted, deadline)
        async with turn(self._turn, deadline, wait=request.wait):
            end = await self._ending(device, host, tensors, deadline)
            request = request.with_specs(specs, total)
            assert request.bucket_bytes is not None
            payload = Payload(
                tensors, given.ready, specs, request.bucket_bytes, request.check_finite
            )
            try:
                return await self._updates.update(request, end, lambda: end.load(payload))
            finally:
                end.unload(payload)

    async def update_from_disk(self, path: Any, request: UpdateRequest) -> UpdateReport:
        """Update the workers from a folder, whose safetensors files they read themselves."""
        request.check(self._channel.version)
        deadline = Deadline(request.timeout, request.begun)
        wanted = await self._updates.describe(deadline)
        loop = asyncio.get_running_loop()
        files, seen = await loop.run_in_executor(None, _read_folder, path)
        dtypes = {spec.name: spec.dtype for spec in wanted.tensors}
        specs = []
        for name, dtype, shape in ((s.name, s.dtype, s.shape) for s in files.specs):
            if name not in dtypes and (name in wanted.ignored or is_computed(name)):
                continue
            if dtype not in FLOAT_BYTES:
                raise InvalidWeights(f"{name} in {files.file_of[name]} holds {dtype}, not floats")
            specs.append(TensorSpec(name, dtypes.get(name, dtype), shape))
        tied = [n for n in wanted.tied if n in files.file_of and n not in dtypes]
        try:
            if tied:
                await self._check_tied_files(files, tied, wanted, deadline)
            request = msgspec.structs.replace(
                request.with_specs(specs), folder=str(files.files[0].parent), seen=seen
            )
            return await self._updates.update(request, None)
        except InvalidWeights as error:
            raise InvalidWeights(files.naming_files(error.message)) from None

    async def _check_tied_files(
        self, files: Checkpoint, tied: list[str], wanted: ModelDescription, deadline: Deadline
    ) -> None:
        """Check the tied tensors in the files against the tensors to which the engine ties them."""
        from .tensor_source import Manifest, Taken
        from .verification import check_ties

        names = [n for n in {*tied, *(wanted.tied[n] for n in tied)} if n in files.file_of]
        loop = asyncio.get_running_loop()
        read = await loop.run_in_executor(None, lambda: [(n, files.read(n)) for n in names])
        manifest = Manifest()
        manifest.take(read, wanted)
        ask = self._channel.checksums
        await check_ties(manifest, Taken(read, []), ask, wanted, deadline)

    async def _ending(self, device: Any, host: str | None, tensors: Any, deadline: Deadline) -> Any:
        from .bucket_sender import SendingEnd, sending_device

        host = self._channel.host if host is None else host
        backend = (await self._updates.settings(deadline)).device
        if self._end is not None and device is None and self._end.host == host:
            return self._end
        device = sending_device(device, tensors, backend)
        if self._end is None or self._end.device != device or self._end.host != host:
            end: Any = None

            def answer(message: Any) -> None:
                self._updates.sender_answered(end, message)

            end = SendingEnd(device, host, answer)
            self._forget_end()
            self._end = end
        return self._end


def _read_folder(path: Any) -> tuple[Checkpoint, list[Any]]:
    files = read_checkpoint(path)
    if not files.specs:
        raise InvalidWeights(f"no tensors are given: the files in {path} are empty")
    return files, fingerprint(files.files)
