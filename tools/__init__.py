"""Workshop tools: compiling and estimating without a GPU, other versions, what only a GPU shows.

They are not part of the wheel; the package imports none of them.
"""
