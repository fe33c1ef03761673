"""A model in memory that is trained step by step, for publishers that are fed with tensors."""

from __future__ import annotations

import numpy as np

from helpers.tiny_checkpoint import write_full

NAMES = ("a.weight", "b.weight", "c.weight")


class Model:
    """A model in memory that is trained step by step."""

    def __init__(self, root):
        self.rng = np.random.default_rng(0)
        self.arrays = {name: self.rng.standard_normal((8, 16)).astype(np.float32) for name in NAMES}
        self.base = write_full(root / "model", self.tensors)

    @property
    def tensors(self):
        return {name: ("F32", array.shape, array.tobytes()) for name, array in self.arrays.items()}

    def train(self, *, names=NAMES[:2]):
        for name in names:
            self.arrays[name] = self.arrays[name] + np.float32(self.rng.standard_normal())
        return self.arrays
