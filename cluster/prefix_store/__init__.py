"""The cluster's prefix store: KV blocks in host memory, so that any replica finds a prefix that another one computed.

One named, detached actor per application (`actor`) owns the objects and keeps a directory of block hashes
(`directory`); what it holds survives the replicas that computed it. Each replica has a connector (`connector`) that
writes in the background, reads with a deadline, and follows the directory (`follower`), so that a prompt that the store
knows nothing of costs no question. Only KV of the same weights and options is ever found (`identity`).
"""
