"""The command line, ``python -m cupyflash``."""
