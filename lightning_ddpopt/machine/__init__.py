"""What the machine is and does: versions and device, and the transport that NCCL took."""
