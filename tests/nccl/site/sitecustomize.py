"""With this folder on PYTHONPATH a rank that any launcher starts has the variables of its way
(tests/nccl/ways.py); as in tests/helpers/site, small parameters are sharded unless a configuration
asks.
"""

import os
import runpy

HERE = os.path.dirname(os.path.abspath(__file__))
runpy.run_path(os.path.join(HERE, "../../helpers/site/sitecustomize.py"))
runpy.run_path(os.path.join(HERE, "../ways.py"))["apply"]()
