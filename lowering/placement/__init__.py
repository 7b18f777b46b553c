"""`placement="auto"`: which layers gain by int8, by a floor under an engine's time."""
