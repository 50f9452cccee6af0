"""Which replica gets a request: pure Python without Ray, sockets or threads, so that a simulation runs the same code.

    fleet = Fleet(block_size=32)                        # what is known of the replicas
    policy = create_policy("prefix", random.Random())   # cluster.routing.policies
    question = fleet.ask(request)
    replica = policy.choose(question, fleet.views(names))
    fleet.sent(replica, question)                       # then fleet.prefilled(...), fleet.ended(...)

Engines' news comes in by `fleet.load_is`, `fleet.cache_is` and `fleet.cache_changed`; without any, the fleet goes by
what this router sent itself.
"""
