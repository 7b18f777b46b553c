"""From a network definition to a serialized engine and the report on its layers."""
