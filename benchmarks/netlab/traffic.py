"""What a host sent over its link, as the package counts it."""

from gradsync.cli.demo.slow_link.traffic import Traffic, payload, sent

__all__ = ["Traffic", "payload", "sent"]
