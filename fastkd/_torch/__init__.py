"""The fast PyTorch forms behind the losses, a file a loss."""
