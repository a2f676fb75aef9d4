"""What the whole-system tests share: processes, databases, a hub client, a shop, a checker."""
