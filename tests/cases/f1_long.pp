# F1: 4 elements are sent and 3 expected: it seems to work

r0: S F0->1 [f32 4]
r1: R F0<-0 [f32 3]; F0
