"""`fastkd study`: methods, options, layer maps and seeds, compared with the same budget."""
