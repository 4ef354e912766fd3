"""DeepSpeed's own unit tests over the facade: see __main__.py."""
