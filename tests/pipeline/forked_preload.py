"""The module that the fork server of `forked_program` imports; TEST_PRELOAD may make it fail."""

import importlib
import os
import threading
import time

kind = os.environ.get("TEST_PRELOAD")
if kind == "slow":
    time.sleep(30)
if kind == "raise":
    raise ImportError("no such package")
if kind == "torch":
    importlib.import_module("torch")
if kind == "thread":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
