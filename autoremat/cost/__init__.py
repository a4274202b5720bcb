"""What an operation costs: time and workspace, measured on the device or estimated."""
