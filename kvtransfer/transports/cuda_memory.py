"""GPU memory that other processes of the machine can write into: where a KV pool lies."""

from __future__ import annotations

import secrets

import torch

from kvtransfer.transports.cuda_driver import CudaDriver, Driver

# The driver shares whole pages of this size; what lay beside the area in one would be shared too.
PAGE_BYTES = 2 << 20
NONCE_BYTES = 16


class CudaArea:
    """`num_bytes` of `device`'s memory. `tensor` is all of them, uint8, zero at first.

    Behind them lies a nonce: who opened `handle` and reads the same one there has the right memory.
    Raises OSError when there is too little memory or no driver.
    """

    def __init__(self, num_bytes: int, device: torch.device, driver: Driver | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.driver = driver or CudaDriver()
        self.device, self.nbytes = device, num_bytes
        self.whole_bytes = -(-(num_bytes + NONCE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._address = self.driver.allocate(device, self.whole_bytes)
        try:
            self.handle = self.driver.export(device, self._address)
            whole = self.driver.view(self._address, self.whole_bytes)
            self.tensor = whole[:num_bytes]
            whole[num_bytes : num_bytes + NONCE_BYTES].copy_(
                torch.frombuffer(bytearray(self.nonce), dtype=torch.uint8)
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory: no tensor over it is used any more, and no kernel runs on it.

        To be called when all links are gone: freeing what another process has open is undefined.
        The end of this process is not; the driver keeps the memory until the others let go.
        """
        address, self._address = self._address, 0
        if address:
            self.driver.free(self.device, address)
