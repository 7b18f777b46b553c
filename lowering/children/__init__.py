"""The submodules of a model that itself stays Python: which are lowered, what they are called with, what runs them."""
