"""The losses in the protocols of other libraries; each module needs an extra of its own."""
