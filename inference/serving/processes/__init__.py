"""The processes of a service, and the messages between them."""
