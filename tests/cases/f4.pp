# F4: the same shape in another memory layout

r0: S F0->1 [f32 4x4 strides 1x4]
r1: R F0<-0 [f32 4x4]; F0
