"""What the op folders share: descriptions of shipped Triton configurations, and the check that compiles them."""
