"""The PyTorch reference: the folder that imports torch and transformers."""
