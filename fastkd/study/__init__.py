"""`fastkd study`: compares methods, options, layer maps and seeds at one training budget."""
