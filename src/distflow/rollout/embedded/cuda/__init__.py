"""Steps of the embedded engine chained on a device: the host launches them, and looks at their tokens later."""
