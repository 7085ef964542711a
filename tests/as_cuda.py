"""A pytest plugin: quantized caches hand out plain rows as they do on CUDA (runtime/kv/device.py).

    PYTHONPATH=tests .venv/bin/python -m pytest -p as_cuda -n0 tests/test_kv_models.py

A fixture would come too late: modules read PLAIN_ROWS when they are imported.
"""

from unittest import mock

import mlx.core as mx

with mock.patch.object(mx.cuda, "is_available", return_value=True):
    from straightline.runtime.kv import device

assert device.PLAIN_ROWS
