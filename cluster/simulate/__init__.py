"""`sliceserve simulate`: a cluster in virtual time, with the real scheduler, routing and autoscaling policies.

    timeline    what happens when; the clock that everything reads
    models      what an engine holds and how long its steps take: the mock backend's numbers,
    slices      or those of the planner for a TPU slice
    engine      EngineCore's loop around the real Scheduler, without thread, device or sleep
    replicas    pools of engines that start, drain, fail and are routed to
    workload    synthetic requests
    trace       requests from a file
    scaling     the autoscaling loop, and failures
    simulation  sends the requests and keeps an account of them
    scenario    puts all of this together
    report      what came out, as a table and as JSON

No Ray, no threads, no wall clock: the same options and seed give the same numbers.
"""
