"""The rows of ``api.py``, by what they are about."""
