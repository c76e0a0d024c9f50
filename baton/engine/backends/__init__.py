"""What runs a plan on a device."""
