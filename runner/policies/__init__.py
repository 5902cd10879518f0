"""The policies that come with plait. Pure."""
