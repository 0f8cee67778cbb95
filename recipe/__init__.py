"""What the top-level scripts share. Start with config.py; then follow a rollout through env_server.py."""
