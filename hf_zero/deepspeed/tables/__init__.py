"""The rows of ``api.py``, by subject."""
