"""Scripts as people write them for FSDP2 or DDP; what is called is `main`. The tests change their import of it."""
