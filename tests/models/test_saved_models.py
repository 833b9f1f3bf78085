"""Saved models load where Keras alone is imported; seeds give equal weights in any process."""

from __future__ import annotations

import hashlib

import numpy as np

from tests.processes import run_python
from tf_largebatch import models

OTHER_PROCESS = """
import hashlib, sys
import keras
import numpy as np

folder, names = sys.argv[1], sys.argv[2:]
images = np.load(f"{folder}/images.npy")
for name in names:
    model = keras.saving.load_model(f"{folder}/{name}.keras")
    np.save(f"{folder}/{name}.npy", model(images).numpy())
assert not any(module.startswith("tf_largebatch") for module in sys.modules)

from tf_largebatch.models import ResNetSmall

weights = ResNetSmall(10, input_shape=(32, 32, 3), seed=3).get_weights()
print(hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest())
"""


def test_saved_models_and_seeds_in_another_process(tmp_path):
    shape = (32, 32, 3)
    built = {
        "bottleneck": models.ResNet50(10, input_shape=shape, seed=3),
        "small": models.ResNetSmall(10, input_shape=shape, weight_decay=1e-4, seed=3),
    }
    images = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    np.save(tmp_path / "images.npy", images)
    for name, model in built.items():
        model.save(tmp_path / f"{name}.keras")
    printed = run_python("-c", OTHER_PROCESS, str(tmp_path), *built)
    for name, model in built.items():
        loaded = np.load(tmp_path / f"{name}.npy")
        np.testing.assert_allclose(loaded, model(images).numpy(), rtol=1e-5, atol=1e-6)
    weights = built["small"].get_weights()
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    assert printed.split()[-1] == digest
