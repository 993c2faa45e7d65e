# F1: 3 elements are sent and 5 expected: nothing hangs

r0: S F0->1 [f32 3]
r1: R F0<-0 [f32 5]; F0
