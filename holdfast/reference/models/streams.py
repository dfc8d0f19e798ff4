"""A random stream for each module, which no other module's draws touch."""

from __future__ import annotations

import hashlib

import torch

from holdfast.errors import ConfigError


class RandomStream:
    """While it is entered, torch's dropout draws from a generator of its own.

        stream = RandomStream(7, device=device)
        with stream:
            y = module(x)

    Dropout draws from the device's default generator and takes no other. So that one is set to the
    stream's state on entry, and back to its own on exit: two modules on one rank never share a
    stream, and what one draws does not depend on whether the other is there.

    Cost: two reads and two writes of a generator's state, 5 kB on the CPU.
    """

    def __init__(self, seed: int, *, device: torch.device) -> None:
        """Seed the stream; the default generator is left as it is."""
        self.generator = torch.Generator(device).manual_seed(seed)
        """What to save: its state is that after the last exit."""
        self._outside: torch.Tensor | None = None

    def __enter__(self) -> RandomStream:
        """Draw from the stream; ConfigError where it is entered already."""
        if self._outside is not None:
            raise ConfigError("a random stream is entered already: its draws would be repeated")
        default = _default_generator(self.generator.device)
        self._outside = default.get_state()
        default.set_state(self.generator.get_state())
        return self

    def __exit__(self, *error: object) -> None:
        """Keep what was drawn, and let the default generator go on where it was."""
        default = _default_generator(self.generator.device)
        self.generator.set_state(default.get_state())
        if self._outside is not None:
            default.set_state(self._outside)
        self._outside = None


def derive_seed(*parts: object) -> int:
    """A seed that is a function of these parts' texts; different ones have different seeds."""
    text = ":".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _default_generator(device: torch.device) -> torch.Generator:
    """What torch draws from on a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
