"""A run as pictures: SVG made here, every text escaped, sizes bounded however long the run was."""
