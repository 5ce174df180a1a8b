"""The suite of devices: norms whose statistics are spread over processes, each with a device of its own."""
