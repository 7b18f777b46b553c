"""How each family of layers is computed with torch. `lowering.trt.reference.table` says which function runs what."""
