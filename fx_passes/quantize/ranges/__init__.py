"""The range of a value: observed, from a histogram, or trained."""
