"""One module for each framework that cupyflash plugs into; imported by its name only."""
