"""Models, photographs and measurements. Results are printed and written to `build/`; none is asserted."""
