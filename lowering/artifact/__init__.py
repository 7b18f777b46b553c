"""A lowered module as a folder: what is written, what is read back, and what is checked before anything is believed."""
