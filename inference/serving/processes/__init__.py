"""The process that holds the models of a service, and the messages between the two."""
